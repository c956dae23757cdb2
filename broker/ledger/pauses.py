"""Pauses of a run at the end of a step, as its broker has them in its records.

    PauseRun ──> closing: no worker begins another step; each says which is the first that it has not begun
    all have said ──> settled: the last of those steps is the one before which the run pauses; the others go on to it
    all stand before it ──> the run is paused
    PauseRun(resumes) ──> over: nothing is held back

Each order to the workers has a number above those before it: that of the time, so that a broker with old records gives
out none twice. All of it is stored before any worker is told, so that a broker that is started again, and a worker that
takes a lost one's place, go on from there. Lost records are rebuilt from what workers report.
"""

from collections.abc import Iterable, Iterator, Mapping

import msgspec

from stageline.broker.control.pauses import HeldBack, Hold
from stageline.broker.control.store import Fact

from .milestones import Milestone

KEPT = 64  # newest pauses
_FACT = "pauses"  # its name in a store
_LOST = "a person whom the records have lost"


class Pause(msgspec.Struct, frozen=True):
    """A pause, which `by` has asked for.

    Attributes:
        by: Who has asked, for people.
        reason: Why, for people; "" without a reason.
        since: When, in seconds since the epoch.
        step: Steps before it are finished; None before workers agree on it.
        until: When it was over, in seconds since the epoch; None while it lasts.
        ended: Who has ended it, for people.
        leaving: True if it lasts until workers that leave on notice have left.
    """

    by: str
    reason: str
    since: float
    step: int | None = None
    until: float | None = None
    ended: str = ""
    leaving: bool = False

    @property
    def lasts(self) -> bool:
        """True if it is not over."""
        return self.until is None

    @property
    def milestones(self) -> Iterator[Milestone]:
        """Beginning and end of the pause, as far as they have come; none if no step was agreed on for it."""
        if self.step is not None:
            why = f" ({self.reason})" if self.reason else ""
            yield Milestone("pause", self.since, self.step, why=f"by {self.by}{why}")
            if self.until is not None:
                yield Milestone("pause-end", self.until, self.step, why=f"by {self.ended}")


class PauseBook(msgspec.Struct):
    """A run's pauses, the newest last, and the number of the newest order about them."""

    number: int = 0
    closed: int = 0  # the step that the newest pause has closed at first
    pauses: list[Pause] = []

    @classmethod
    def stored_in(cls, facts: Mapping[str, Fact]) -> "PauseBook":
        """Return the book among a store's `facts`, or an empty one if there is none."""
        return msgspec.convert(facts[_FACT], cls) if facts.get(_FACT) else cls()

    def fact(self) -> tuple[str, Fact]:
        """Return the book as a fact for a store, with its name there."""
        return _FACT, msgspec.to_builtins(self)

    @property
    def present(self) -> Pause | None:
        """The pause that lasts, None if there is none."""
        return self.pauses[-1] if self.pauses and self.pauses[-1].lasts else None

    @property
    def milestones(self) -> list[Milestone]:
        """The beginnings and ends of all pauses, in order."""
        return [found for each in self.pauses for found in each.milestones]

    @property
    def steps(self) -> list[int]:
        """The steps before which the run has paused, or is to: workers take snapshots of the state there."""
        return [each.step for each in self.pauses if each.step is not None]

    @property
    def after(self) -> int:
        """The first step that no pause has lengthened: of the step after a pause, some workers know a long wait."""
        return max(self.steps, default=-1) + 1

    @property
    def seconds(self) -> dict[int, float]:
        """The seconds for which the run was paused, by the step before which it was."""
        found: dict[int, float] = {}
        for each in self.pauses:
            if each.step is not None and each.until is not None:
                found[each.step] = found.get(each.step, 0.0) + max(0.0, each.until - each.since)
        return found

    @property
    def order(self) -> Hold:
        """The newest order to the workers."""
        found = self.present
        if found is None:
            return Hold(self.number)
        step = self.closed if found.step is None else found.step
        return Hold(self.number, step, settled=found.step is not None, leaving=found.leaving)

    def begin(self, by: str, reason: str, closed: int, now: float, *, leaving: bool = False) -> None:
        """Begin a pause, unless one lasts: no worker begins step `closed`. One that lasts for leavers is taken over.

        Args:
            by: Who asks for it, for people.
            reason: Why, for people.
            closed: The step.
            now: Seconds since the epoch.
            leaving: True for a pause that lasts until workers that leave on notice have left.
        """
        if self.present is None:
            self._number(now)
            self._add(Pause(by, reason, now, leaving=leaving), closed)
        elif self.present.leaving and not leaving:
            self._number(now)
            self._replace(by=by, reason=reason, since=now, leaving=False)

    def settle(self, closed: Iterable[int], now: float) -> None:
        """Pause before the last of the steps `closed`, one of each worker. `now` is in seconds since the epoch."""
        self._number(now)
        self._replace(step=max(closed))

    def end(self, by: str, now: float) -> None:
        """End the pause that lasts, if there is one. `now` is in seconds since the epoch."""
        if self.present is not None:
            self._number(now)
            self._replace(until=now, ended=by)

    def learn(self, held: HeldBack, now: float) -> None:
        """Take over an order that a worker knows and these records do not: a pause is over, or settles again.

        Args:
            held: What the worker knows.
            now: Seconds since the epoch.
        """
        self.number = held.number
        if held.step is None and self.present is not None:
            self._replace(until=now, ended=_LOST)
        elif held.step is not None and self.present is None:
            self._add(Pause(_LOST, "", now, leaving=held.leaving), held.step)
        elif held.step is not None:
            self.closed = held.step
            self._replace(step=None, leaving=held.leaving)

    def _number(self, now: float) -> None:
        self.number = max(self.number + 1, int(now * 1000))

    def _add(self, pause: Pause, closed: int) -> None:
        self.closed = closed
        self.pauses = [*self.pauses, pause][-KEPT:]

    def _replace(self, **changed: object) -> None:
        self.pauses = [*self.pauses[:-1], msgspec.structs.replace(self.pauses[-1], **changed)]
