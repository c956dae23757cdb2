"""How a worker process begins and ends, as far as one process shows it; whole runs are in tests/integration."""

import errno
import re
import socket
from pathlib import Path

import pytest

from stageline.broker.control.protocol import Assigned, Failed, Goodbye
from stageline.broker.errors import EndpointTaken, Fenced, QueueGap
from stageline.pipeline.data import DataError
from stageline.pipeline.errors import ExitCode
from stageline.pipeline.plan import read_plan
from stageline.workers.checkpoint.directory import SnapshotFailed
from stageline.workers.checkpoint.snapshot import SnapshotDamaged
from stageline.workers.control.session import Stopped
from stageline.workers.process import worker_process as process
from stageline.workers.process.worker_process import WorkerOptions, failures_reported, run_worker, warm_up
from stageline.workers.runtime.executor import ComputeFailed
from stageline.workers.runtime.job import prepare
from support.paths import EXAMPLES
from support.workspace import Workspace


class Sent(list):
    """In place of a control thread: what was sent to the broker."""

    send = list.append


@pytest.mark.parametrize(("step", "kind"), [(0, Failed), (20, Goodbye)])
def test_an_address_in_use_ends_the_run_unless_it_may_be_a_predecessors_that_hangs(
    step: int, kind: type, tmp_path: Path
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        url = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        job = prepare(read_plan(EXAMPLES / "mlp", sets=[f"queues.url={url}"], environment={}))
        sent = Sent()
        with pytest.raises(EndpointTaken):
            process._open_queues(job, Assigned("run-1", 0, 7, step), sent, tmp_path, lambda reason: None)
    [message] = sent
    assert isinstance(message, kind)
    assert f"its queues cannot be opened: cannot listen at {url}: it is in use" in message.reason


@pytest.mark.parametrize(
    ("error", "reason", "code"),
    [
        (ComputeFailed("layer 3"), "explained: layer 3", ExitCode.FAILED),
        (DataError("no rows"), "no rows", ExitCode.REFUSED),
        (QueueGap("message 3 is gone"), "message 3 is gone", ExitCode.FAILED),
        (SnapshotDamaged(Path("step-4"), "truncated"), "resume the run as a whole (--resume)", ExitCode.FAILED),
        (Stopped("no other workers came", ExitCode.NO_WORKER), "no other workers came", ExitCode.NO_WORKER),
        (ZeroDivisionError("0"), "a bug in stageline: ZeroDivisionError: 0", ExitCode.FAILED),
    ],
)
def test_the_broker_receives_why_a_worker_ends(error: Exception, reason: str, code: int) -> None:
    sent = Sent()
    with pytest.raises(type(error)), failures_reported(sent, 7, lambda error: f"explained: {error}", replaced=True):
        raise error
    [message] = sent
    assert isinstance(message, Failed)
    assert reason in message.reason
    assert (message.incarnation, message.code) == (7, code)


@pytest.mark.parametrize(("replaced", "kind"), [(True, Goodbye), (False, Failed)])
def test_an_interrupted_worker_ends_the_run_unless_it_can_be_replaced(replaced: bool, kind: type) -> None:
    sent = Sent()
    with pytest.raises(Stopped), failures_reported(sent, 7, str, replaced=replaced):
        raise Stopped("interrupted by SIGTERM", ExitCode.INTERRUPTED)
    assert [type(message) for message in sent] == [kind]


@pytest.mark.parametrize(("replaced", "kind"), [(True, Goodbye), (False, Failed)])
def test_a_worker_whose_queue_belongs_to_a_newer_one_only_leaves_where_workers_are_replaced(
    replaced: bool, kind: type
) -> None:
    sent = Sent()
    with pytest.raises(Fenced), failures_reported(sent, 7, str, replaced=replaced):
        raise Fenced("backward-2 is taken by incarnation 9 now; this worker is incarnation 7 and must stop")
    assert [type(message) for message in sent] == [kind]


def lacking_memory() -> Exception:
    error = ComputeFailed("stage 1 failed in 1F3")
    error.__cause__ = RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes.")
    return error


def full_disk() -> Exception:
    error = SnapshotFailed("stage 1 could not write its snapshot")
    error.__cause__ = OSError(errno.ENOSPC, "No space left on device")
    return error


@pytest.mark.parametrize("replaced", [True, False])
@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (MemoryError(), "lacks memory"),
        (lacking_memory(), "stage 1 failed in 1F3"),
        (OSError(errno.EMFILE, "Too many open files"), "lacks resources: .* Too many open files"),
    ],
)
def test_a_worker_without_memory_or_descriptors_leaves_where_workers_are_replaced(
    error: Exception, reason: str, replaced: bool
) -> None:
    sent = Sent()
    with pytest.raises(type(error)), failures_reported(sent, 7, str, replaced=replaced):
        raise error
    assert [type(message) for message in sent] == [Goodbye if replaced else Failed]
    assert not replaced or re.search(reason, sent[0].reason)


def test_a_disk_that_was_full_for_too_long_ends_the_run_also_where_workers_are_replaced() -> None:
    sent = Sent()
    with pytest.raises(SnapshotFailed), failures_reported(sent, 7, str, replaced=True):
        raise full_disk()
    assert [type(message) for message in sent] == [Failed]


def test_a_worker_that_finds_no_broker_exits_with_the_code_for_that(workspace: Workspace) -> None:
    options = WorkerOptions("tcp://127.0.0.1:9", "worker-0", broker_timeout=0.1)
    assert run_worker(read_plan(workspace.folder), options) == ExitCode.NO_BROKER


def test_a_device_that_this_machine_lacks_is_not_warmed_up(workspace: Workspace) -> None:
    warm_up(read_plan(workspace.folder, sets=["workers.0.stages=[0,1]", "workers.0.device=cuda:99"]), 0)
