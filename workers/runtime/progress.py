"""What the compute loop leaves behind for the reports: plain attributes and lists, never a lock or a call.

The loop writes, one other thread reads (`ControlThread`, which sends reports of it). A reader sees each value whole,
though perhaps a moment old; nothing in here ever makes the loop wait.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from time import time

import msgspec

from stageline.broker.control.messages import StepDigest
from stageline.broker.control.records import EvaluationRecord, StepRecord, Wait, WorkerRecord
from stageline.broker.ledger.ledger import packed_times
from stageline.broker.queues.base import Depth, WorkerQueues
from stageline.pipeline.program import Instruction, Per, Program, Queue
from stageline.pipeline.retry import ResourceFault
from stageline.pipeline.stage.stage import Stage

from .calls import Position
from .executor.stage_bytes import HeldBytes
from .machine import AwaitCredit, Take
from .orders import StepOrders


class Done(msgspec.Struct):
    """An action of the step that is still open at its stage, with its start and end in seconds since the epoch."""

    instruction: Instruction
    start: float
    end: float


@dataclass(slots=True)
class Progress:
    """`instruction`, `waits` and `since` (seconds since the epoch) say what the loop does, `actions` how many it has
    completed, `busy` for how many seconds it has computed in all. `open` holds, for each stage, the actions of its
    open step; `steps` the records of finished steps, taken away by the reader. `depths` is filled in by the loop when
    the reader wants it, since only the loop may look into its queues."""

    since: float = field(default_factory=time)
    waits: bool = True
    over: bool = False  # the program is over; what is left is to save the weights
    actions: int = 0
    busy: float = 0.0
    instruction: Instruction | None = None
    open: defaultdict[int, list[Done]] = field(default_factory=lambda: defaultdict(list))
    steps: deque[StepRecord] = field(default_factory=deque)
    evaluations: list[EvaluationRecord] = field(default_factory=list)  # of all rounds, in order; on the last stage
    depths: dict[str, Depth] = field(default_factory=dict)
    depths_wanted: bool = False
    lacking: Take | AwaitCredit | None = None  # what the loop waits for, if `waits`, or wants room for
    full: float | None = None  # since when it waits for room for what it has computed; None: it does not
    snapshots: deque[tuple[int, int]] = field(default_factory=deque)  # (stage, step) on disk, taken away by the reader
    complete: int = 0  # the newest complete checkpoint that the broker has announced, or that the loop has begun with
    last: int = -1  # the run's last stage
    finished: dict[int, int] = field(default_factory=dict)  # steps, by stage of this worker
    losses: dict[int, float | None] = field(default_factory=dict)  # by step, those that are kept; on the last stage
    newest: tuple[int, float | None] | None = None  # the newest finished step and its loss; on the last stage
    written: list[tuple[int, int]] = field(default_factory=list)  # (stage, step) of all that this process has on disk
    stages: Mapping[int, Stage] = field(default_factory=dict)  # for the layer that they are in
    queues: WorkerQueues | None = None  # for the trouble that they have
    digests: deque[StepDigest] = field(default_factory=deque)  # of what they put and take; taken away by the reader
    writes: str = ""  # what the loop waits for until it is written, "a snapshot is"; "" if it does not
    faults: dict[str, ResourceFault] = field(default_factory=dict)  # what cannot be done now, by what does it
    call: tuple[Queue, int] | None = None  # what the loop waits for the script to put or to take
    answered: dict[Per, int] = field(default_factory=dict)  # how much has arrived at the script, of what it is sent
    called_for: int = 0  # training steps, by a script
    said: str = ""  # what a script does, in words; "" for a worker
    wants: Wait | None = None  # the reply that a script waits for
    program: Program | None = None  # what the loop runs; a script's process has none
    orders: StepOrders | None = None  # of a run that chooses its schedule
    unordered: int | None = None  # the step that the loop does not begin before it knows its order
    stage_bytes: dict[int, HeldBytes] = field(default_factory=dict)  # by stage
    positions: dict[int, Position] = field(default_factory=dict)  # by step, those of a scripted run from `complete` on
    position_after: Callable[[int], Position] = Position  # so many steps, where none of those is

    def computing(self, instruction: Instruction, now: float) -> None:
        """The loop starts on `instruction`."""
        self.instruction, self.waits, self.since = instruction, False, now

    def waiting(self, lacking: Take | AwaitCredit) -> None:
        """The loop needs a message for its next instruction, which may be here already, or credit for what that
        gives."""
        self.instruction, self.lacking, self.waits = lacking.instruction, lacking, True

    def waiting_for_order(self, step: int, now: float) -> None:
        """Nothing can be computed before it is known by which schedule `step` goes."""
        if self.unordered != step:
            self.since = now
        self.unordered, self.waits, self.lacking = step, True, None

    def lacks_room(self, wanting: Take, now: float) -> None:
        """The loop has computed what it cannot put yet, message `wanting`: there is no room to keep it."""
        self.lacking = wanting
        if self.full is None:
            self.full = now

    def waiting_for_script(self, queue: Queue, number: int, now: float) -> None:
        """Nothing is left to compute until the script puts call `number` into `queue`, or takes what came of it from
        there."""
        if self.call != (queue, number):
            self.since = now
        self.call, self.waits = (queue, number), True

    def lacks_room_for_reply(self, queue: Queue, number: int, now: float) -> None:
        """The reply to call `number` cannot be put yet: there is no room to keep it, since the script takes none."""
        self.waiting_for_script(queue, number, now)
        if self.full is None:
            self.full = now

    @property
    def called(self) -> int | None:
        """All training steps that a script has called for, once it makes no more calls; None before, and of a
        worker."""
        return self.called_for if self.said and self.over else None

    def is_after(self, step: int, stage: int) -> bool:
        """Whether `stage` has finished the steps before `step`, and begun nothing of those from there on."""
        instruction = self.instruction
        begun = not self.waits and instruction is not None and instruction.counted and instruction.step >= step
        return self.finished[stage] == step and not self.open[stage] and not begun

    def position(self, step: int) -> Position:
        """The position after `step` steps. A scripted run that has not come there, or is beyond it, knows the step
        alone: nothing is trimmed then but what is counted by steps. A run that no script calls always knows it."""
        known = self.positions.get(step)
        return self.position_after(step) if known is None else known

    def may_report(self, step: int) -> bool:
        """Whether a snapshot of `step` may become part of a checkpoint: not before the script has the replies to all
        calls up to there. A worker that begins there gives no reply to those."""
        position = self.positions.get(step)
        return position is None or all(position.of(per) <= count for per, count in self.answered.items())

    @property
    def reportable(self) -> bool:
        """Whether there is a snapshot to report."""
        return bool(self.snapshots) and self.may_report(self.snapshots[0][1])

    @property
    def held_back(self) -> bool:
        """Whether there is a snapshot that cannot be reported yet."""
        return any(not self.may_report(step) for _, step in list(self.snapshots))

    def completed(self, step: int) -> None:
        """The checkpoint of `step` is complete."""
        self.complete = max(step, self.complete)
        self.positions = {each: position for each, position in self.positions.items() if each >= self.complete}

    def done(self, instruction: Instruction, now: float) -> None:
        """The loop has carried out `instruction`, on which it started at `since`, and put what it gives."""
        end = now if self.full is None else self.full
        self.actions += 1
        self.busy += end - self.since
        self.open[instruction.action.stage].append(Done(instruction, self.since, end))
        self.since, self.full = now, None

    def evaluated(self, now: float) -> None:
        """The same, of an instruction that belongs to none of the run's steps."""
        self.actions += 1
        self.busy += (now if self.full is None else self.full) - self.since
        self.since, self.full = now, None

    def found(self, record: EvaluationRecord) -> None:
        """A round of evaluation has ended on the last stage."""
        self.evaluations.append(record)

    def closed(self, stage: int, step: int, loss: float | None, norm: float | None = None) -> None:
        """`stage` has finished `step`."""
        mine = [d for d in self.open[stage] if d.instruction.step == step]
        self.open[stage] = [d for d in self.open[stage] if d.instruction.step != step]
        times = packed_times((d.instruction.action, d.start, d.end) for d in mine)
        self.steps.append(StepRecord(stage, step, times, loss, norm))
        self.finished[stage] = step + 1
        if stage == self.last:
            self.newest = step, loss

    def restored(self, losses: Mapping[int, float | None], evaluations: Iterable[EvaluationRecord]) -> None:
        """The loop has begun with a snapshot in which these are; the broker's records may have lost them."""
        self.losses.update(losses)
        self.steps.extend(self._of_losses(losses))
        self.evaluations.extend(evaluations)

    def durable(self, stage: int, step: int) -> None:
        """A snapshot is on disk. For the thread that writes them."""
        self.written.append((stage, step))
        self.snapshots.append((stage, step))

    def note_fault(self, source: str, fault: ResourceFault | None) -> None:
        """What `source` cannot do now; None: nothing. For any thread."""
        if fault is None:
            self.faults.pop(source, None)
        else:
            self.faults[source] = fault

    @property
    def fault(self) -> ResourceFault | None:
        """What cannot be done now: first of all what the loop waits for."""
        faults = list(self.faults.values())
        return next((fault for fault in faults if fault.blocks), faults[0] if faults else None)

    def memory(self, run: str, index: int) -> WorkerRecord:
        """What a broker that has lost its records must know at once. For the reader."""
        orders = [] if self.orders is None else list(self.orders.known[0])
        step = min(self.finished.values(), default=self.called_for)
        return WorkerRecord(run, index, self.complete, step, orders)

    def records(self, steps: int | None) -> list[StepRecord]:
        """What it must know next: how far each stage is, of the `steps` that are trained (None: as many as a script
        likes), and the losses before."""
        losses = dict(self.losses) | dict([self.newest] if self.newest else [])
        trained = {stage: done if steps is None else min(done, steps) for stage, done in self.finished.items()}
        others = [(stage, done) for stage, done in trained.items() if stage != self.last]
        return [StepRecord(stage, done - 1, b"") for stage, done in others if done] + self._of_losses(losses)

    def _of_losses(self, losses: Mapping[int, float | None]) -> list[StepRecord]:
        return [StepRecord(self.last, step, b"", loss) for step, loss in sorted(losses.items())]
