"""The state of every microbatch at every stage, for the steps that some stage has not finished.

    queued ──> forward ──> stashed ──> backward ────────────────────> done
                  │            └────> input ──> halfway ──> weight ────^     a backward in two halves
                  └────────────────────────────────────────────────────^     frozen stages stop after forward

Reports are samples: intermediate states may be missing, and late or repeated events change nothing. Finished steps are
records with the times of their actions. A record names each action that its stage ran: frozen stages, shared parameters
and a replayed prefix change the list, and the broker makes schedules without the model.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from math import isfinite

from stageline.broker.control.messages import Report, StepDigest
from stageline.broker.control.records import Event, StepRecord
from stageline.broker.errors import BrokerError

from .times import unreadable_times

LEAD = 100_000  # steps by which a worker's events may be ahead of its records that have come


class MicrobatchState(StrEnum):
    """A microbatch's progress at a stage, in the order of a step."""

    QUEUED = "queued"  # its activation has not been taken
    FORWARD = "forward"  # being computed
    STASHED = "stashed"  # its gradient has not been taken
    BACKWARD = "backward"  # being computed
    INPUT = "input"  # the first half of a backward, being computed
    HALFWAY = "halfway"  # the gradient of its input was sent, those of the weights are not computed
    WEIGHT = "weight"  # the second half, being computed
    DONE = "done"


_IN_TIME = list(MicrobatchState)
_COMPUTING = {
    MicrobatchState.FORWARD: "F",
    MicrobatchState.BACKWARD: "B",
    MicrobatchState.INPUT: "I",
    MicrobatchState.WEIGHT: "W",
}


class IllegalTransition(BrokerError):
    """Error that a worker reports what cannot be.

    Mend: See that all machines have one version of stageline, and no other program sends to the broker; report it
    otherwise.

    Example: the evaluation after step 40 is not its own
    """

    error_code = "SL902"


@dataclass(frozen=True, slots=True)
class Holder:
    """A worker that has a microbatch, with the incarnation under which it got the microbatch."""

    name: str
    incarnation: int


@dataclass(frozen=True, slots=True)
class LedgerEntry:
    """A microbatch's state at one stage, `since` seconds since the epoch, or None if not reported."""

    state: MicrobatchState
    since: float | None = None
    holder: Holder | None = None


@dataclass(frozen=True, slots=True)
class MicrobatchPosition:
    """A microbatch of a step, at a stage."""

    stage: int
    step: int
    microbatch: int


@dataclass(frozen=True, slots=True)
class Held:
    """A microbatch at a stage that has not finished the microbatch's step."""

    position: MicrobatchPosition
    entry: LedgerEntry

    @property
    def computed(self) -> bool:
        """True if an action on the microbatch is under way; otherwise it is stashed."""
        return self.entry.state in _COMPUTING

    def __str__(self) -> str:
        """Return the action under way, such as "2B4 of step 7", or the microbatch with its state and stage."""
        at, letter = self.position, _COMPUTING.get(self.entry.state, "")
        if letter:
            return f"{at.stage}{letter}{at.microbatch} of step {at.step}"
        return f"microbatch {at.microbatch} of step {at.step}, {self.entry.state} at stage {at.stage}"


@dataclass(frozen=True, slots=True)
class IngestedReport:
    """The new part of a report.

    Attributes:
        steps: Finished steps to store.
        losses: Losses to store, by step.
        illegal: Errors for the parts that were left out.
    """

    steps: list[StepRecord] = field(default_factory=list)
    losses: dict[int, float | None] = field(default_factory=dict)
    illegal: list[IllegalTransition] = field(default_factory=list)


_QUEUED = LedgerEntry(MicrobatchState.QUEUED)


class Ledger:
    """A run's progress, taken from workers' reports: each microbatch's state and each stage's finished steps.

    Losses of every `log_every`th training step and of the last one are kept.
    """

    def __init__(self, stages: int, microbatches: int, log_every: int = 1, *, last: int | None = None) -> None:
        """Start at step 0.

        Args:
            stages: The number of stages; of copies, where stages have replicas.
            microbatches: The number of microbatches in a step.
            log_every: Steps from one kept loss to the next.
            last: The stage that reports the losses: the first copy of the last stage. By default the last of `stages`.
        """
        self.microbatches = microbatches
        self.finished = [0] * stages  # steps that each stage has finished
        self.losses: dict[int, float | None] = {}
        self.last_loss: tuple[int, float | None] | None = None
        self.last_norm: tuple[int, float] | None = None  # a step, and the norm of its gradients
        self._log_every = log_every
        self._last = stages - 1 if last is None else last
        self._recent: dict[int, float | None] = {}  # losses by step: the newest that every stage has finished, and on
        self._open: list[dict[int, dict[int, LedgerEntry]]] = [{} for _ in range(stages)]  # [stage][step][microbatch]

    @property
    def finished_floor(self) -> int:
        """The first step that some stage has not finished; messages from before it are no longer needed."""
        return min(self.finished)

    @property
    def finished_loss(self) -> tuple[int, float | None] | None:
        """The newest training step that every stage has finished, with its loss; None before the first."""
        step = max((step for step in self._recent if step < self.finished_floor), default=None)
        return None if step is None else (step, self._recent[step])

    @property
    def begun(self) -> int:
        """The first step that no stage has begun."""
        return max(max(self.finished), *(max(still_open, default=-1) + 1 for still_open in self._open))

    def restore(self, finished: Mapping[int, int], losses: Mapping[int, float | None]) -> None:
        """Continue from a store: steps finished by stage, and losses by step."""
        for stage, steps in finished.items():
            self.finished[stage] = steps
        for step in sorted(losses):
            self._keep_loss(step, losses[step])

    def reach(self, step: int) -> None:
        """Note that every stage has finished the steps before `step`, even without records of them."""
        self.finished = [max(step, known) for known in self.finished]

    def go_back(self, stages: Iterable[int], step: int) -> None:
        """Send stages back to `step`, from which they train again. Losses stay: they will be the same."""
        for stage in stages:
            self.reset([stage], min(self.finished[stage], step))

    def reset(self, stages: Iterable[int], step: int) -> None:
        """Note that stages have finished exactly the steps before `step`, whatever the ledger had."""
        for stage in stages:
            self.finished[stage] = step
            self._open[stage].clear()

    def ingest(
        self, report: Report, stages: Collection[int], holder: Holder, *, counted: Collection[int] = ()
    ) -> IngestedReport:
        """Record the steps and events of the worker that owns `stages`; return what was new.

        Args:
            report: Steps and events of a worker.
            stages: Stages that the worker owns.
            holder: The worker, as the holder of microbatches.
            counted: Stages whose number of finished steps is known, so that only their next steps can be new.
        """
        found = IngestedReport()
        for record in report.steps:
            try:
                _check_owned(record.stage, stages)
                if record.stage in counted:
                    self._check_next(record)
                self.finish(record)
            except IllegalTransition as error:
                found.illegal.append(error)
            else:
                found.steps.append(record)
                if self._has_loss(record):
                    found.losses[record.step] = record.loss
        for event in report.events:
            try:
                _check_owned(event.stage, stages)
                self.enter(event, holder)
            except IllegalTransition as error:
                found.illegal.append(error)
        return found

    def enter(self, event: Event, holder: Holder) -> None:
        """Record that a microbatch entered a state. Raises `IllegalTransition` if that cannot be."""
        if not 0 <= event.stage < len(self.finished):
            raise IllegalTransition(f"there is no stage {event.stage}: the plan has {len(self.finished)}")
        if not 0 <= event.microbatch < self.microbatches:
            raise IllegalTransition(f"there is no microbatch {event.microbatch}: a step has {self.microbatches}")
        if event.state not in _IN_TIME:
            raise IllegalTransition(f"no microbatch can be {event.state!r}: {', '.join(_IN_TIME)}")
        if not (isfinite(event.at) and event.step - self.finished[event.stage] <= LEAD):
            raise IllegalTransition(f"stage {event.stage} cannot be at step {event.step} at the time {event.at}")
        state = MicrobatchState(event.state)
        old = self.entry(MicrobatchPosition(event.stage, event.step, event.microbatch))
        if _IN_TIME.index(state) > _IN_TIME.index(old.state):
            step = self._open[event.stage].setdefault(event.step, {})
            step[event.microbatch] = LedgerEntry(state, event.at, holder)
        elif old.since is not None and event.at > old.since:
            raise IllegalTransition(
                f"microbatch {event.microbatch} of step {event.step} cannot go from {old.state} to {state} "
                f"at stage {event.stage}"
            )

    def finish(self, record: StepRecord) -> None:
        """Close a step, and the steps before it, at a stage.

        Raises `IllegalTransition` if the record's times are invalid.
        """
        if why := unreadable_times(record.times, self.microbatches):
            raise IllegalTransition(f"step {record.step} of stage {record.stage} {why}")
        if self._has_loss(record):
            self._keep_loss(record.step, record.loss)
            self._keep_norm(record)
        if record.step >= self.finished[record.stage]:
            self.finished[record.stage] = record.step + 1
            still_open = self._open[record.stage].items()
            self._open[record.stage] = {step: kept for step, kept in still_open if step > record.step}

    def _check_next(self, record: StepRecord) -> None:
        finished = self.finished[record.stage]
        if record.step > finished:
            raise IllegalTransition(
                f"stage {record.stage} cannot have finished step {record.step}: step {finished} is its next"
            )

    def entry(self, position: MicrobatchPosition) -> LedgerEntry:
        """Return the state of a microbatch at a stage; its time and holder are known while its step is open."""
        if position.step < self.finished[position.stage]:
            return LedgerEntry(MicrobatchState.DONE)
        return self._open[position.stage].get(position.step, {}).get(position.microbatch, _QUEUED)

    def held(self, stages: Iterable[int]) -> list[Held]:
        """Return the microbatches that `stages` have begun and not finished, by stage, step and microbatch."""
        begun = (held for stage in stages for held in self.unfinished(stage))
        return [held for held in begun if held.entry.state not in (MicrobatchState.QUEUED, MicrobatchState.DONE)]

    def unfinished(self, stage: int) -> Iterator[Held]:
        """Yield the microbatches of the steps that `stage` has begun and not finished, including those done."""
        for step, entries in sorted(self._open[stage].items()):
            for microbatch, entry in sorted(entries.items()):
                yield Held(MicrobatchPosition(stage, step, microbatch), entry)

    def _has_loss(self, record: StepRecord) -> bool:
        """Return True if `record` contains its step's loss: the last stage's records do."""
        return record.stage == self._last

    @property
    def _newest_finished(self) -> int:
        found = self.finished_loss
        return 0 if found is None else found[0]

    def _keep_loss(self, step: int, loss: float | None) -> None:
        number = loss if loss is not None and isfinite(loss) else None  # JSON and SQL have no NaN
        if step % self._log_every == 0:
            self.losses.setdefault(step, number)
        if self.last_loss is None or step > self.last_loss[0]:
            self.last_loss = step, number
        self._recent[step] = number
        self._recent = {each: loss for each, loss in self._recent.items() if each >= self._newest_finished}

    def _keep_norm(self, record: StepRecord) -> None:
        if record.norm is not None and isfinite(record.norm) and record.step >= (self.last_norm or (0,))[0]:
            self.last_norm = record.step, record.norm


def _check_owned(stage: int, stages: Collection[int]) -> None:
    if stage not in stages:
        raise IllegalTransition(f"stage {stage} is not its own")


DIGEST_SIGNS = 16  # characters of a digest before its mark
REMEMBERED = 8192  # steps of each queue


class QueueDigests:
    """A memory of the digests of each queue's newest steps, as the first end to report each one gave it.

    Only queues whose messages lie at a server have digests, since another client can replace messages there. `differed`
    is True once the digests of both ends have differed. Digests with other keys, which their marks tell, are not
    compared.
    """

    def __init__(self) -> None:
        """Start without digests."""
        self.differed = False
        self._known: dict[str, dict[tuple[int, str], str]] = {}  # by queue, step and mark

    def differing(self, reported: Iterable[StepDigest]) -> tuple[str, int] | None:
        """Return the queue and step of the first digest that contradicts the one reported before; None if all agree."""
        places = ((queue, step) for queue, step, digest in reported if not self._agrees(queue, step, digest))
        place = next(places, None)
        self.differed = self.differed or place is not None
        return place

    def clear(self) -> None:
        """Forget all digests: running workers report theirs again, and other workers may put other messages."""
        self._known.clear()

    def _agrees(self, queue: str, step: int, digest: str) -> bool:
        known = self._known.setdefault(queue, {})
        agrees = known.setdefault((step, digest[DIGEST_SIGNS:]), digest) == digest
        if len(known) > REMEMBERED:
            del known[next(iter(known))]
        return agrees
