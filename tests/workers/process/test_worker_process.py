"""How a worker process begins and ends, as far as one process shows it; whole runs are in tests/integration."""

import socket
from contextlib import ExitStack
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from stageline.broker.control.messages import Assigned, Failed, Goodbye
from stageline.broker.errors import EndpointTaken
from stageline.pipeline.errors import ExitCode
from stageline.pipeline.plan import read_plan
from stageline.workers.process import worker_process as process
from stageline.workers.process.worker import Worker, WorkerOptions
from stageline.workers.process.worker_process import run_worker, warm_up
from stageline.workers.runtime.job import prepare
from stageline.workers.runtime.losses import ComputeFailed
from support.paths import EXAMPLES
from support.workspace import Workspace


class Sent(list):
    """In place of a control thread: what was sent to the broker."""

    send = list.append


@pytest.mark.parametrize(
    ("step", "standing_in", "kind"), [(0, False, Failed), (20, False, Goodbye), (0, True, Goodbye)]
)
def test_an_address_in_use_ends_the_run_unless_it_may_be_a_predecessors_that_hangs_or_another_places(
    step: int, standing_in: bool, kind: type, tmp_path: Path
) -> None:
    options = WorkerOptions("tcp://127.0.0.1:9", "worker-0", standing_in=standing_in)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        url = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        job = prepare(read_plan(EXAMPLES / "mlp", sets=[f"queues.url={url}"], environment={}))
        sent = Sent()
        with pytest.raises(EndpointTaken), ExitStack() as stack:
            Worker(stack, job, Assigned("run-1", 0, 7, step), sent, options, tmp_path)
    [message] = sent
    assert isinstance(message, kind)
    assert f"its queues cannot be opened: cannot listen at {url}: it is in use" in message.reason


def test_a_worker_that_finds_no_broker_exits_with_the_code_for_that(workspace: Workspace) -> None:
    options = WorkerOptions("tcp://127.0.0.1:9", "worker-0", broker_timeout=0.1)
    assert run_worker(read_plan(workspace.folder), options) == ExitCode.NO_BROKER


class Truthless(ValueError):
    """An exception that cannot say whether it is true."""

    def __bool__(self) -> bool:
        raise SystemExit(4)


def test_an_exception_without_a_truth_value_of_its_own_is_logged_with_its_traceback(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker ended with the exit code that the user's class chose, and logged nothing."""

    def fails(*_: object) -> int:
        raise ComputeFailed("stage 0 failed in 0F0 of step 3") from Truthless("no such row")

    monkeypatch.setattr(process, "_run", fails)
    with capture_logs() as logged:
        assert run_worker(read_plan(workspace.folder), WorkerOptions("tcp://127.0.0.1:9", "w")) == ExitCode.FAILED
    assert logged[-1]["exception"].endswith("Truthless: no such row")


def test_a_device_that_this_machine_lacks_is_not_warmed_up(workspace: Workspace) -> None:
    warm_up(read_plan(workspace.folder, sets=["workers.0.stages=[0,1]", "workers.0.device=cuda:99"]), 0)


@pytest.mark.parametrize(
    ("key", "kept"),
    [
        ("memory.offload=[]", True),
        ('memory.offload=["activations"]', False),
        ('stage.1.offload=["weights"]', False),
        ('stage.0.offload=["weights"]', True),  # of another worker
        ("memory=4GiB", False),
        ('memory={limit="4GiB", tight=[1]}', False),
        ('memory={limit="4GiB", tight=[0]}', True),
    ],
)
def test_a_worker_keeps_the_memory_that_it_frees_unless_memory_is_scarce(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch, key: str, kept: bool
) -> None:
    calls: list[bool] = []
    monkeypatch.setattr(process, "keep_freed_memory", lambda: calls.append(True))
    monkeypatch.setattr(process, "give_back_memory", lambda: calls.append(False))
    process._keep_memory(read_plan(workspace.folder, sets=[key]), 1)
    assert calls == [kept]
