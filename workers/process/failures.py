"""How a worker that ends early tells the broker: it gives its place back to a replacement, or ends the run."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from stageline.broker.control.messages import Failed, Goodbye
from stageline.broker.errors import BrokerError, Fenced
from stageline.pipeline.errors import (
    DataError,
    ExitCode,
    GroupLost,
    StagelineError,
    class_name,
    describe_error,
    error_text,
)
from stageline.pipeline.printable import bounded
from stageline.pipeline.retry import causes, lacks_memory, passing_fault
from stageline.workers.checkpoint.snapshot import SnapshotDamaged
from stageline.workers.control.control_thread import ControlThread
from stageline.workers.control.session import Stopped
from stageline.workers.disk.background_writer import WriteFailed
from stageline.workers.runs.metrics import MetricsNotWritten
from stageline.workers.runtime.losses import ComputeFailed

RESUME_AS_A_WHOLE = (
    "The other stages do not go back for one of them: resume the run as a whole (--resume), and all begin at an older "
    "checkpoint, if there is one that is not damaged"
)


Texts = Callable[[BaseException, str], str]  # an error and its reason -> what is sent of that


def plain(error: BaseException, reason: str) -> str:
    """All of it."""
    return reason


def withheld(error: BaseException, reason: str) -> str:
    """`reason` without the texts of what the user's code raised, which may show values: of a row, or a label."""
    for raised in causes(error.__cause__):
        name = f"{class_name(raised)}, whose text is in this worker's log alone (data.stays)"
        for text in (describe_error(raised), error_text(raised)):
            reason = reason.replace(text, name)
    return reason


@contextmanager
def failures_reported(
    control: ControlThread,
    incarnation: int,
    explain: Callable[[ComputeFailed], str],
    *,
    replaced: bool,
    texts: Texts = plain,
) -> Iterator[None]:
    """Reports to the broker why the work within ends early; what the user's own code raised as `explain` has it. Of
    each reason, what `texts` makes of it is sent.

    A worker that is interrupted ends the run, unless it can be `replaced`: then it only gives its place back. So does
    one whose queue end belongs to a newer incarnation: if the broker takes it for current, its records are old. So does
    one that leads a group of processes, if another of them is lost. So does one that lacks memory, or descriptors where
    the user's code needs them: a fresh process has its own.
    """
    try:
        yield
    except BaseException as error:  # whatever it was, the run must end with its reason
        leaves = isinstance(error, Stopped) and error.code == ExitCode.INTERRUPTED
        leaves = leaves or isinstance(error, Fenced | GroupLost) or lacks_resources(error)
        if (isinstance(error, Stopped) and error.broker_knows) or (leaves and replaced):
            control.send(Goodbye(incarnation, bounded(texts(error, why_it_leaves(error)))))
        else:
            reason, code = _cause(error, explain)
            control.send(Failed(incarnation, bounded(texts(error, reason)), code))
        raise


def lacks_resources(error: BaseException) -> bool:
    """Whether another process could do better. Not after a fault that was waited for did not pass, as on a disk."""
    if isinstance(error, WriteFailed | SnapshotDamaged | MetricsNotWritten | BrokerError):
        return lacks_memory(error)
    return passing_fault(error) is not None


def why_it_leaves(error: BaseException) -> str:
    """Why a worker gives its place back, for people."""
    if isinstance(error, Stopped | Fenced | GroupLost | ComputeFailed | DataError):
        return str(error)
    return f"lacks memory: {error}" if lacks_memory(error) else f"lacks resources: {error}"


def _cause(error: BaseException, explain: Callable[[ComputeFailed], str]) -> tuple[str, int]:
    """Why a worker ends, for people, and its exit code."""
    match error:
        case Stopped():
            return str(error), error.code
        case ComputeFailed():
            return explain(error), error.exit_code
        case SnapshotDamaged():
            return f"{error}. {RESUME_AS_A_WHOLE}", error.exit_code
        case StagelineError():
            return str(error), error.exit_code
        case KeyboardInterrupt():  # no signal: those end the loop between two actions
            return "the model, the data or a metric raised KeyboardInterrupt", ExitCode.FAILED
        case _ if lacks_resources(error):
            return why_it_leaves(error), ExitCode.FAILED
        case _:
            return f"a bug in stageline: {type(error).__name__}: {error}", ExitCode.FAILED
