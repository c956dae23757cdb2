"""A run as the commands see it that put it on a page: its broker or its records to ask, and its folder."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from stageline.workers.runs.folder import Facts

from . import options
from .output import CommandFailed

_NO_LOSSES = str(10**14)  # a step from which on no run has losses


@dataclass(frozen=True, slots=True)
class RunView:
    """A run that can be asked.

    Attributes:
        ask: Asks a question by its name.
        folder: Folder of the run; None if it is not on this machine.
        source: "broker" or "records".
        as_of: Time at which the answers are true, in seconds since the epoch.
    """

    ask: Callable[..., Facts]
    folder: Path | None
    source: str
    as_of: float


@contextmanager
def view_of(where: str | None, broker: str | None) -> Iterator[RunView]:
    """Return a context whose value is the run that `where` names, or that of the `broker`.

    Raises the errors of `options.answer_about`.
    """
    status = options.answer_about(where, broker, "status", losses_from=_NO_LOSSES)
    with options.questioning(where, broker) as ask:
        yield RunView(ask, _folder(where, broker), status["source"], status["as_of"])


def _folder(where: str | None, broker: str | None) -> Path | None:
    if broker is not None:
        return None
    try:
        return options.folder_of(where)
    except CommandFailed:  # its plan is here, and its broker elsewhere
        return None
