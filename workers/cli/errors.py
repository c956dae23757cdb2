"""How a command fails: a sentence for the user on stderr, and an exit code that says whose turn it is."""

import errno
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from broker.exit import Exit


class Failure(Exception):
    """Ends the command with a sentence for the user, and `code`."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code


_EXPECTED = {
    ("pipeline.plan", "PlanRefused"): Exit.REFUSED,
    ("pipeline.schedule", "ScheduleRefused"): Exit.REFUSED,
    ("pipeline.model", "ModelRefused"): Exit.REFUSED,
    ("pipeline.data", "DataError"): Exit.REFUSED,
    ("workers.runs", "NoSuchRun"): Exit.USAGE,
    ("workers.replay", "NoSuchMicrobatch"): Exit.USAGE,
    ("workers.records", "NotRecorded"): Exit.USAGE,
    ("workers.recordfile", "RecordDamaged"): Exit.FAILED,
    ("workers.manifest", "SnapshotDamaged"): Exit.FAILED,
    ("workers.executor", "ComputeFailed"): Exit.FAILED,
    ("pipeline.errors", "ForeignState"): Exit.FAILED,
    ("workers.runs", "FolderUnusable"): Exit.REFUSED,
    ("workers.sockets", "TooDeep"): Exit.FAILED,
    ("workers.client", "BrokerUnreachable"): Exit.NO_BROKER,
    ("broker.errors", "BrokerError"): Exit.FAILED,
    ("zmq.error", "ZMQError"): Exit.FAILED,
}


_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


@contextmanager
def explained() -> Iterator[None]:
    """Turns what is expected to go wrong into a `Failure`; bugs pass."""
    try:
        yield
    except Exception as error:
        for (module, name), code in _EXPECTED.items():
            # An error of a module that was never loaded cannot have been raised; loading it may take seconds.
            if module in sys.modules and isinstance(error, getattr(sys.modules[module], name)):
                raise Failure(str(error), code) from error
        if isinstance(error, OSError):
            raise Failure(_of_the_system(error), Exit.FAILED) from error
        raise


def _of_the_system(error: OSError) -> str:
    reason = error.strerror or str(error)
    if error.filename is not None:
        return f"cannot use {error.filename}: {reason}"
    if error.errno in _FULL:  # the system does not say of which file
        return f"cannot write to stdout, or to the run's folder: {reason}"
    return reason
