"""Where a worker's queues are, as other workers can reach them."""

import pytest

from stageline.workers.process.open_queues import reachable


@pytest.mark.parametrize("endpoint", ["ipc:///tmp/q", "tcp://127.0.0.1:7001", "tcp://10.1.2.3:7001", "redis://h:6379"])
def test_an_endpoint_with_an_address_stays_as_it_is(endpoint):
    assert reachable(endpoint, "tcp://127.0.0.1:5600") == endpoint


@pytest.mark.parametrize("bound", ["tcp://0.0.0.0:7001", "tcp://*:7001", "tcp://[::]:7001"])
@pytest.mark.parametrize("broker", ["tcp://127.0.0.1:5600", "tcp://localhost:5600", "ipc:///tmp/broker"])
def test_an_endpoint_on_all_interfaces_is_named_by_the_way_to_the_broker(bound, broker):
    assert reachable(bound, broker) in ("tcp://127.0.0.1:7001", "tcp://[::1]:7001")
