"""The record of every microbatch's state at every stage, of the steps that some stage has not finished.

    queued ──> forward ──> stashed ──> backward ──> done
                  └────────────────────────────────^        frozen stages, and evaluation, stop after forward

Reports are samples: what lies between two of them may be left out, and what comes late or twice changes nothing.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from math import isfinite

from stageline.broker.control.protocol import Event, StepRecord
from stageline.broker.errors import BrokerError

ACTION_BYTES = 16  # of a step record's `times`: start and end of one action


class MicrobatchState(StrEnum):
    """Where a microbatch is at a stage."""

    QUEUED = "queued"  # its activation has not been taken
    FORWARD = "forward"  # being computed
    STASHED = "stashed"  # its gradient has not been taken
    BACKWARD = "backward"  # being computed
    DONE = "done"


_NEXT: Mapping[MicrobatchState, frozenset[MicrobatchState]] = {
    MicrobatchState.QUEUED: frozenset({MicrobatchState.FORWARD}),
    MicrobatchState.FORWARD: frozenset({MicrobatchState.STASHED, MicrobatchState.DONE}),
    MicrobatchState.STASHED: frozenset({MicrobatchState.BACKWARD}),
    MicrobatchState.BACKWARD: frozenset({MicrobatchState.DONE}),
    MicrobatchState.DONE: frozenset(),
}
_COMPUTED = {MicrobatchState.FORWARD: "F", MicrobatchState.BACKWARD: "B"}


class IllegalTransition(BrokerError):
    """A worker reports what cannot be; its report is wrong, or its schedule is."""


@dataclass(frozen=True, slots=True)
class Holder:
    """Who has a microbatch: a worker's name and the incarnation under which it got it."""

    name: str
    incarnation: int


@dataclass(frozen=True, slots=True)
class LedgerEntry:
    """A microbatch's state at one stage, `since` seconds since the epoch. A queued one need not be known to anyone."""

    state: MicrobatchState
    since: float | None = None
    holder: Holder | None = None


@dataclass(frozen=True, slots=True)
class WorkPosition:
    """A microbatch of a step, at a stage."""

    stage: int
    step: int
    microbatch: int


@dataclass(frozen=True, slots=True)
class Held:
    """A microbatch that somebody has begun and not finished."""

    place: WorkPosition
    entry: LedgerEntry

    @property
    def computed(self) -> bool:
        """Whether an action on it is under way; if not, it lies stashed."""
        return self.entry.state in _COMPUTED

    def __str__(self) -> str:
        place, letter = self.place, _COMPUTED.get(self.entry.state, "")
        if letter:
            return f"{place.stage}{letter}{place.microbatch} of step {place.step}"
        return f"microbatch {place.microbatch} of step {place.step}, {self.entry.state} at stage {place.stage}"


_UNHEARD = LedgerEntry(MicrobatchState.QUEUED)


class Ledger:
    """Fed with workers' events and step records; asked where a microbatch is and how far each stage has come.

    It keeps the losses of every `log_every`th training step and of the last one.
    """

    def __init__(self, stages: int, microbatches: int, log_every: int = 1) -> None:
        self.microbatches = microbatches
        self.finished = [0] * stages  # steps that each stage has finished
        self.losses: dict[int, float | None] = {}
        self.last_loss: tuple[int, float | None] | None = None
        self._log_every = log_every
        self._open: list[dict[int, dict[int, LedgerEntry]]] = [
            {} for _ in range(stages)
        ]  # stage: step: microbatch: entry

    @property
    def finished_floor(self) -> int:
        """The first step that some stage has not finished: nobody needs a message from before it."""
        return min(self.finished)

    @property
    def begun(self) -> int:
        """The first step that no stage has begun."""
        return max(max(self.finished), *(max(still_open, default=-1) + 1 for still_open in self._open))

    def restore(self, finished: Mapping[int, int], losses: Mapping[int, float | None]) -> None:
        """Takes up where a broker before this one was: steps finished by stage, losses by step."""
        for stage, steps in finished.items():
            self.finished[self._known(stage)] = steps
        for step in sorted(losses):
            self._keep_loss(step, losses[step])

    def reach(self, step: int) -> None:
        """Every stage has finished the steps before `step`, also those of which there are no records."""
        self.finished = [max(step, known) for known in self.finished]

    def go_back(self, stages: Iterable[int], step: int) -> None:
        """The stages will do `step` and what follows again. Losses stay: they will be the same."""
        for stage in stages:
            self.finished[stage] = min(self.finished[stage], step)
            self._open[stage].clear()

    def settle(self, stages: Iterable[int], step: int) -> None:
        """The stages have finished the steps before `step`, whatever was known of them."""
        for stage in stages:
            self.finished[stage] = step
            self._open[stage].clear()

    def enter(self, event: Event, holder: Holder) -> None:
        """Writes down that a microbatch entered a state. Raises `IllegalTransition` if it cannot have."""
        place = self._place(event)
        state = self._state(event)
        old = self.entry(place)
        if state in _after(old.state):
            step = self._open[event.stage].setdefault(event.step, {})
            step[event.microbatch] = LedgerEntry(state, event.at, holder)
        elif old.since is not None and event.at > old.since:
            raise IllegalTransition(
                f"microbatch {place.microbatch} of step {place.step} cannot go from {old.state} to {state} "
                f"at stage {place.stage}"
            )

    def finish(self, record: StepRecord) -> None:
        """Closes a step, and the ones before it, at a stage. Raises `IllegalTransition` if the record cannot be."""
        stage = self._known(record.stage)
        self._check_times(record)
        if self.takes_loss(record):
            self._keep_loss(record.step, record.loss)
        if record.step >= self.finished[stage]:
            self.finished[stage] = record.step + 1
            self._close(stage, record.step)

    def takes_loss(self, record: StepRecord) -> bool:
        """Whether `record` tells a training step's loss: the last stage does. Evaluation is F and nothing else."""
        only_forward = self.microbatches * ACTION_BYTES
        return record.stage == len(self.finished) - 1 and len(record.times) != only_forward

    def entry(self, place: WorkPosition) -> LedgerEntry:
        """Where a microbatch is at a stage; since when and with whom is known while its step is open."""
        if place.step < self.finished[self._known(place.stage)]:
            return LedgerEntry(MicrobatchState.DONE)
        return self._open[place.stage].get(place.step, {}).get(place.microbatch, _UNHEARD)

    def held(self, stages: Iterable[int]) -> list[Held]:
        """What is begun and not finished at `stages`, by stage, step and microbatch."""
        begun = (held for stage in stages for held in self._entries(stage))
        return [held for held in begun if held.entry.state not in (MicrobatchState.QUEUED, MicrobatchState.DONE)]

    def begun_at(self, stage: int) -> list[tuple[WorkPosition, MicrobatchState]]:
        """Where the microbatches are that `stage` has begun, of the steps that it has not finished."""
        return [(held.place, held.entry.state) for held in self._entries(stage)]

    def _entries(self, stage: int) -> Iterator[Held]:
        for step, entries in sorted(self._open[stage].items()):
            for microbatch, entry in sorted(entries.items()):
                yield Held(WorkPosition(stage, step, microbatch), entry)

    def _close(self, stage: int, step: int) -> None:
        still_open = self._open[stage]
        for finished in [each for each in still_open if each <= step]:
            del still_open[finished]

    def _keep_loss(self, step: int, loss: float | None) -> None:
        number = loss if loss is not None and isfinite(loss) else None  # JSON and SQL have no NaN
        if step % self._log_every == 0:
            self.losses.setdefault(step, number)
        if self.last_loss is None or step > self.last_loss[0]:
            self.last_loss = step, number

    def _place(self, event: Event) -> WorkPosition:
        self._known(event.stage)
        if not 0 <= event.microbatch < self.microbatches:
            raise IllegalTransition(f"there is no microbatch {event.microbatch}: a step has {self.microbatches}")
        return WorkPosition(event.stage, event.step, event.microbatch)

    def _known(self, stage: int) -> int:
        if not 0 <= stage < len(self.finished):
            raise IllegalTransition(f"there is no stage {stage}: the plan has {len(self.finished)}")
        return stage

    def _state(self, event: Event) -> MicrobatchState:
        try:
            return MicrobatchState(event.state)
        except ValueError:
            raise IllegalTransition(f"no microbatch can be {event.state!r}: {', '.join(MicrobatchState)}") from None

    def _check_times(self, record: StepRecord) -> None:
        if len(record.times) % ACTION_BYTES:
            raise IllegalTransition(
                f"step {record.step} of stage {record.stage} has {len(record.times)} bytes of times; "
                f"an action takes {ACTION_BYTES}"
            )


def _after(state: MicrobatchState) -> frozenset[MicrobatchState]:
    return _AFTER[state]


def _reachable(state: MicrobatchState) -> frozenset[MicrobatchState]:
    return _NEXT[state].union(*map(_reachable, _NEXT[state]))


_AFTER = {state: _reachable(state) for state in MicrobatchState}
