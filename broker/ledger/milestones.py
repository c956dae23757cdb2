"""Milestones of a run: losses, returns of lost places, restarts of its broker, resumptions, pauses, checkpoints.

The newest are kept, and written with every checkpoint. Checkpoints, of which there are many, displace no loss. Those of
pauses are not kept here: `pauses.py` has them.
"""

from collections import deque
from collections.abc import Iterable, Iterator
from typing import Literal

import msgspec

KEPT_CHECKPOINTS = 100  # newest ones of a run
KEPT_EVENTS = 100  # others, likewise


class Milestone(msgspec.Struct, frozen=True):
    """A loss, a return of a lost worker's place to work, or another event of a run.

    Attributes:
        what: "loss", "leave" of a worker on notice, "return", "broker" for a restart of it, "resume" of a run that was
            stopped, "pause", "pause-end", or a complete "checkpoint".
        at: Its time, in seconds since the epoch.
        step: Step of the checkpoint, or to which the lost worker's stages go back; of a restart or resumption, the
            first step that some stage had not finished; of a pause, the step before which the run rested.
        worker: Index of the worker, of a loss, a leave and a return.
        why: End of a sentence about the worker, or about the pause.
    """

    what: Literal["loss", "leave", "return", "broker", "resume", "pause", "pause-end", "checkpoint"]
    at: float
    step: int
    worker: int | None = None
    why: str = ""


class Milestones:
    """The newest milestones of a run."""

    def __init__(self, kept: Iterable[Milestone] = ()) -> None:
        """Begin with those that are stored."""
        self._checkpoints: deque[Milestone] = deque(maxlen=KEPT_CHECKPOINTS)
        self._events: deque[Milestone] = deque(maxlen=KEPT_EVENTS)
        for each in kept:
            self.append(each)

    def __iter__(self) -> Iterator[Milestone]:
        """Yield all, in the order of time."""
        return iter(sorted([*self._checkpoints, *self._events], key=lambda each: each.at))

    @property
    def events(self) -> list[Milestone]:
        """All but checkpoints, in the order of time."""
        return sorted(self._events, key=lambda each: each.at)

    def append(self, milestone: Milestone) -> None:
        """Note a milestone."""
        (self._checkpoints if milestone.what == "checkpoint" else self._events).append(milestone)
