"""Where a worker's queues are, as other workers can reach them."""

from pathlib import Path

import pytest

from stageline.broker.control.messages import Assigned
from stageline.broker.control.place_keys import PlaceKeys
from stageline.pipeline.program import compile_program
from stageline.pipeline.schedule import make_schedule
from stageline.workers.control.party_trust import PartiesDiffer
from stageline.workers.process.open_queues import open_queues, reachable
from support.keyed import OTHER, WORKER
from support.small_plans import plan

SEALS = PlaceKeys(0, (b"", b"k" * 32), b"", (), b"s" * 32)


@pytest.mark.parametrize("keys", [PlaceKeys(), PlaceKeys(0, SEALS.links), PlaceKeys(0, salt=SEALS.salt)])
def test_no_worker_of_a_run_with_parties_opens_queues_without_secrets(keys: PlaceKeys, tmp_path: Path) -> None:
    """By default they are not sealed: what lies at a server was clear."""
    parties = {
        "hospital": {"key": WORKER.public.text, "workers": [0]},
        "lab": {"key": OTHER.public.text, "workers": [1]},
    }
    ours, program = plan(parties=parties), compile_program(make_schedule("1f1b", ((0,), (1,)), 4))
    with pytest.raises(PartiesDiffer, match="worker 0 has no secrets for its queues"):
        open_queues(ours, program, Assigned("run-1", 0, 1, 0, keys=keys), tmp_path, print, pair=WORKER)
    for given, pair in ((SEALS, WORKER), (keys, None)):  # without a key all workers are on one machine
        open_queues(ours, program, Assigned("run-1", 0, 1, 0, keys=given), tmp_path, print, pair=pair).close()


@pytest.mark.parametrize("endpoint", ["ipc:///tmp/q", "tcp://127.0.0.1:7001", "tcp://10.1.2.3:7001", "redis://h:6379"])
def test_an_endpoint_with_an_address_stays_as_it_is(endpoint):
    assert reachable(endpoint, "tcp://127.0.0.1:5600") == endpoint


@pytest.mark.parametrize("bound", ["tcp://0.0.0.0:7001", "tcp://*:7001", "tcp://[::]:7001"])
@pytest.mark.parametrize("broker", ["tcp://127.0.0.1:5600", "tcp://localhost:5600", "ipc:///tmp/broker"])
def test_an_endpoint_on_all_interfaces_is_named_by_the_way_to_the_broker(bound, broker):
    assert reachable(bound, broker) in ("tcp://127.0.0.1:7001", "tcp://[::1]:7001")
