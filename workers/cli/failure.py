"""How a command fails: a sentence for the user on stderr, and an exit code that says whose turn it is."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum


class Exit(IntEnum):
    """What a caller, or a process supervisor, can act on."""

    OK = 0
    FAILED = 1
    USAGE = 2  # wrong flags
    NO_BROKER = 3
    REFUSED = 78  # the plan cannot work: starting again does not help
    INTERRUPTED = 130


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
    ("workers.client", "BrokerUnreachable"): Exit.NO_BROKER,
    ("broker.errors", "BrokerError"): Exit.FAILED,
}


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
        raise
