"""Where a worker's queues are, as others must be told; and what it tells if it cannot have them there."""

import socket
from pathlib import Path

import pytest

from stageline.broker.control.protocol import Assigned, Failed, Goodbye
from stageline.broker.errors import EndpointTaken
from stageline.pipeline.plan import read_plan
from stageline.workers.process import worker_process as process
from stageline.workers.process.open_queues import reachable
from stageline.workers.runtime.job import prepare
from support.paths import EXAMPLES


@pytest.mark.parametrize("endpoint", ["ipc:///tmp/q", "tcp://127.0.0.1:7001", "tcp://10.1.2.3:7001", "redis://h:6379"])
def test_an_endpoint_with_an_address_is_told_as_it_is(endpoint):
    assert reachable(endpoint, "tcp://127.0.0.1:5600") == endpoint


@pytest.mark.parametrize("bound", ["tcp://0.0.0.0:7001", "tcp://*:7001", "tcp://[::]:7001"])
@pytest.mark.parametrize("broker", ["tcp://127.0.0.1:5600", "tcp://localhost:5600", "ipc:///tmp/broker"])
def test_an_endpoint_on_all_interfaces_is_named_by_the_way_to_the_broker(bound, broker):
    assert reachable(bound, broker) in ("tcp://127.0.0.1:7001", "tcp://[::1]:7001")


class Said(list):
    """What was said to the broker."""

    send = list.append


@pytest.mark.parametrize(("step", "last_word"), [(0, Failed), (20, Goodbye)])
def test_an_address_in_use_ends_the_run_unless_it_may_be_a_predecessors_that_hangs(
    step: int, last_word: type, tmp_path: Path
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        url = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        job = prepare(read_plan(EXAMPLES / "mlp", sets=[f"queues.url={url}"], environment={}))
        said = Said()
        with pytest.raises(EndpointTaken):
            process._open_queues(job, Assigned("run-1", 0, 7, step), said, tmp_path, lambda reason: None)
    [word] = said
    assert isinstance(word, last_word)
    assert f"its queues cannot be opened: cannot listen at {url}: it is in use" in word.reason
