"""How a worker that ends early tells the broker."""

import errno
import re
from pathlib import Path

import pytest

from stageline.broker.control.messages import Failed, Goodbye
from stageline.broker.errors import Fenced, QueueGap
from stageline.pipeline.errors import DataError, ExitCode, describe_error
from stageline.workers.checkpoint.directory import SnapshotFailed
from stageline.workers.checkpoint.snapshot import SnapshotDamaged
from stageline.workers.control.joining import Stopped
from stageline.workers.process.worker import failures_reported, withheld
from stageline.workers.runtime.losses import ComputeFailed


class SentMessages(list):
    """In place of a control thread: what was sent to the broker."""

    send = list.append


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
    sent = SentMessages()
    with pytest.raises(type(error)), failures_reported(sent, 7, lambda error: f"explained: {error}", replaced=True):
        raise error
    [message] = sent
    assert isinstance(message, Failed)
    assert reason in message.reason
    assert (message.incarnation, message.code) == (7, code)


@pytest.mark.parametrize(("replaced", "kind"), [(True, Goodbye), (False, Failed)])
def test_an_interrupted_worker_ends_the_run_unless_it_can_be_replaced(replaced: bool, kind: type) -> None:
    sent = SentMessages()
    with pytest.raises(Stopped), failures_reported(sent, 7, str, replaced=replaced):
        raise Stopped("interrupted by SIGTERM", ExitCode.INTERRUPTED)
    assert [type(message) for message in sent] == [kind]


@pytest.mark.parametrize(("replaced", "kind"), [(True, Goodbye), (False, Failed)])
def test_a_worker_whose_queue_belongs_to_a_newer_one_only_leaves_where_workers_are_replaced(
    replaced: bool, kind: type
) -> None:
    sent = SentMessages()
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
    sent = SentMessages()
    with pytest.raises(type(error)), failures_reported(sent, 7, str, replaced=replaced):
        raise error
    assert [type(message) for message in sent] == [Goodbye if replaced else Failed]
    assert not replaced or re.search(reason, sent[0].reason)


def test_a_disk_that_was_full_for_too_long_ends_the_run_also_where_workers_are_replaced() -> None:
    sent = SentMessages()
    with pytest.raises(SnapshotFailed), failures_reported(sent, 7, str, replaced=True):
        raise full_disk()
    assert [type(message) for message in sent] == [Failed]


def test_where_data_stay_the_broker_is_not_told_the_texts_of_what_user_code_raised() -> None:
    sent = SentMessages()
    cause = IndexError("Target 11 is out of bounds")
    failed = ComputeFailed(f"stage 2 failed in 2F0 of step 3, layer 4 (Linear): {describe_error(cause)}")
    with pytest.raises(ComputeFailed), failures_reported(sent, 7, str, replaced=True, texts=withheld):
        raise failed from cause
    [message] = sent
    assert message.reason == (
        "stage 2 failed in 2F0 of step 3, layer 4 (Linear): IndexError, whose text is in this worker's log alone "
        "(data.stays) [SL203]"
    )
