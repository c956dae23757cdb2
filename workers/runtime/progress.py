"""Progress of a worker's loop, or of a script's driver, kept for the reports.

    loop, snapshots, queues ──events──> Progress ──Doing, records──> Reporter (control thread) ──> broker

The loop writes and the control thread reads, without a lock: it sees each value whole, perhaps a moment old. Fields are
changed by methods of this class alone, but for the deques from which the reporter takes what it sends.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import ClassVar

import msgspec

from stageline.broker.control.messages import WAITS, StepDigest
from stageline.broker.control.records import EvaluationRecord, Lack, StepRecord, Wait, WorkerRecord
from stageline.broker.ledger.times import WaitCause
from stageline.broker.queues.base import Trouble, WorkerQueues
from stageline.pipeline.process.steady_clock import STEADY
from stageline.pipeline.program import Instruction, Per, Program, Queue
from stageline.pipeline.retry import Note, ResourceFault

from .calls import Position, RunCalls
from .copy_progress import CopyProgress
from .idle import CallWait, Doing, Done, IdleTime, times_of
from .machine import AwaitCredit, Take
from .orders import FixedSchedule, HeldSteps
from .queue_counter import QueueCounts

HeldBytes = tuple[int, int, int | None]  # of a stage: lasting; of a microbatch in flight; more between its halves


@dataclass(slots=True)
class Progress:
    """The progress of a process in the run. Times are in seconds since the epoch.

    `busy` says for how many seconds it has computed in all, `open` the actions of each stage's open step. `counts` are
    filled in by the loop when the reader wants them: only the loop may look into its queues.
    """

    since: float = field(default_factory=STEADY.time)  # when the loop began what it does now
    waits: bool = True
    over: bool = False  # the program is over; what is left is to save the weights
    actions: int = 0
    busy: float = 0.0
    leaves_before_its_end: ClassVar[bool] = False  # a script, which goes on to report until the run is over
    instruction: Instruction | None = None
    open: defaultdict[int, list[Done]] = field(default_factory=lambda: defaultdict(list))
    steps: deque[StepRecord] = field(default_factory=deque)  # finished ones; taken away by the reader
    evaluations: list[EvaluationRecord] = field(default_factory=list)  # of all rounds, in order; on the last stage
    counts: QueueCounts = field(default_factory=QueueCounts)
    counts_wanted: bool = False
    lacking: Take | AwaitCredit | None = None  # what the loop waits for, if `waits`, or wants room for
    full: float | None = None  # since when it waits for room for what it has computed; None: it does not
    snapshots: deque[tuple[int, int]] = field(default_factory=deque)  # (stage, step) on disk, taken away by the reader
    complete: int = 0  # the newest complete checkpoint that the broker has announced, or that the loop has begun with
    last: int = -1  # the run's last stage
    finished: dict[int, int] = field(default_factory=dict)  # steps, by stage of this worker
    losses: dict[int, float | None] = field(default_factory=dict)  # by step, those that are kept; on the last stage
    newest: tuple[int, float | None] | None = None  # the newest finished step and its loss; on the last stage
    written: list[tuple[int, int]] = field(default_factory=list)  # (stage, step) of all that this process has on disk
    queues: WorkerQueues | None = None  # for the trouble that they have
    ends: tuple[Queue, ...] = ()  # the queues that this process puts into or takes from
    digests: deque[StepDigest] = field(default_factory=deque)  # of what they put and take; taken away by the reader
    writes: str = ""  # what the loop waits for until it is written, "a snapshot is"; "" if it does not
    faults: dict[str, ResourceFault] = field(default_factory=dict)  # what cannot be done now, by what does it
    call: CallWait | None = None  # what the loop waits for before it has more to compute
    answered: dict[Per, int] = field(default_factory=dict)  # how much has arrived at the script, of what it is sent
    called: int | None = None  # training steps, once a script makes no more calls
    program: Program | None = None  # what the loop runs
    forward_only: frozenset[int] = frozenset()  # stages of this worker that run no backwards
    orders: FixedSchedule = field(default_factory=FixedSchedule)
    held: HeldSteps = field(default_factory=HeldSteps)
    idle: IdleTime = field(default_factory=IdleTime)  # waits since the last action
    copies: CopyProgress = field(default_factory=CopyProgress)
    stage_bytes: dict[int, HeldBytes] = field(default_factory=dict)  # by stage
    positions: dict[int, Position] = field(default_factory=dict)  # by step, those of a scripted run from `complete` on
    position_after: Callable[[int], Position] = Position  # so many steps, where none of those is
    offloading: float = 0.0  # seconds of the present action in which activations came from files or waited for room

    @classmethod
    def of(
        cls,
        calls: RunCalls,
        worker: int,
        *,
        start: int = 0,
        queues: WorkerQueues | None = None,
        now: float | None = None,
    ) -> "Progress":
        """Return the progress of a worker that begins at step `start`.

        Args:
            calls: Calls of the run.
            worker: Place of the worker.
            start: Number of steps that come before.
            queues: Queues of the worker, for their digests and their trouble; None where they have neither.
            now: Seconds since the epoch; by default, those of `STEADY`.
        """
        program, now = calls.program, STEADY.time() if now is None else now
        return cls(
            now,
            complete=start,
            last=program.last,
            finished=dict.fromkeys(program.schedule.placement[worker], start),
            queues=queues,
            ends=program.ends_of(worker),
            digests=deque() if queues is None else queues.digests,
            program=program,
            forward_only=frozenset(s for s in program.schedule.placement[worker] if not program.schedule.trains(s)),
            orders=calls.orders,
            idle=IdleTime(now),
            position_after=calls.position,
        )

    def computing(self, instruction: Instruction, now: float) -> None:
        """Note that the loop starts on `instruction`."""
        self.instruction, self.waits, self.since, self.offloading = instruction, False, now, 0.0
        if not instruction.evaluates:
            self.idle.ends(now)

    def waiting(self, lacking: Take | AwaitCredit) -> None:
        """Note that the loop needs a message for its next instruction, which may be here already, or credit."""
        self.instruction, self.lacking, self.waits = lacking.instruction, lacking, True
        self.idle.lacks(lacking)

    def passed(self, now: float) -> None:
        """Note that the time up to `now` is over: a wait, if there was one, else work of the loop itself."""
        self.idle.ends(now)

    def drew(self, seconds: float) -> None:
        """Note that the action which has been computed first waited so many seconds for rows of the data source."""
        self.idle.note((WaitCause.DATA, None, self.since, self.since + seconds))

    def offloaded(self, seconds: float) -> None:
        """Note that the present action has waited so many seconds for activations in files, or for room there."""
        self.offloading += seconds

    def saved(self, now: float) -> None:
        """Note that what follows an update is over: the copy of a snapshot, and the wait for the one before it."""
        self.idle.lap(now, WaitCause.DISK)

    def lacks_room(self, wanting: Take, now: float) -> None:
        """Note that the loop has computed message `wanting`, but there is no room to keep it: it cannot be put yet."""
        self.lacking = wanting
        if self.full is None:
            self.full = now

    def waiting_for_call(self, call: CallWait, now: float) -> None:
        """Note that nothing is left to compute until `call` comes."""
        if self.call != call:
            self.since = now
        self.idle.awaits(call.cause)
        self.call, self.waits, self.lacking = call, True, None

    def lacks_room_for(self, call: CallWait, now: float) -> None:
        """Note that a message of the source of calls cannot be put yet, since there is no room to keep it."""
        self.waiting_for_call(msgspec.structs.replace(call, lacks=Lack.ROOM), now)
        if self.full is None:
            self.full = now

    def replied(self) -> None:
        """Note that the reply to the open call was put."""
        self.full = None

    def called_to(self, after: Position | None, now: float) -> None:
        """Note that a call has come. `after` is the position after it, if it trains."""
        if self.call is not None:
            self.idle.ends(now)
        self.call = None
        if after is not None:
            self.positions[after.step] = after

    def begins_at(self, position: Position, answered: Mapping[Per, int]) -> None:
        """Note that a scripted run continues from `position`, before which the script has the `answered` replies."""
        self.positions[position.step] = position
        self.answered = dict(answered)

    def arrived(self, per: Per, count: int) -> None:
        """Note that the script has taken `count` messages of the queue whose messages are counted by `per`."""
        self.answered[per] = count

    def forget_answers(self) -> None:
        """Note that the script begins after the newest snapshot, whatever it has taken: all may be reported."""
        self.answered = {}

    def done(self, instruction: Instruction, now: float) -> None:
        """Note that the loop has carried out `instruction`, on which it started at `since`, and put its results."""
        end = now if self.full is None else self.full
        self.actions += 1
        self.busy += end - self.since
        if self.offloading:
            self.idle.note((WaitCause.OFFLOAD, None, self.since, self.since + self.offloading))
        waits = self.idle.taken(now)
        if self.full is not None:
            waits = (*waits, (WaitCause.ROOM, self.lacking, end, now))
        self.open[instruction.op.action.stage].append(Done(instruction, self.since, end, waits))
        self.since, self.full = now, None

    def evaluated(self, now: float) -> None:
        """Note that the loop has carried out an instruction that belongs to none of the run's steps."""
        self._ended(now)

    def judged(self, number: int, now: float) -> None:
        """Note that the verdict on round `number` of evaluation is known, and told to the workers that wait for it."""
        self.call = None
        self._ended(now)

    def found(self, record: EvaluationRecord) -> None:
        """Note that a round of evaluation has ended on the last stage."""
        self.evaluations.append(record)

    def closed(self, stage: int, step: int, loss: float | None, norm: float | None = None) -> None:
        """Note that `stage` has finished `step`."""
        mine = [d for d in self.open[stage] if d.instruction.step == step]
        self.open[stage] = [d for d in self.open[stage] if d.instruction.step != step]
        self.steps.append(StepRecord(stage, step, times_of(mine, self.program), loss, norm))
        self.finished[stage] = step + 1
        if stage == self.last:
            self.newest = step, loss

    def counted(self, counts: QueueCounts) -> None:
        """Take the counts of the queues, which the reader wanted."""
        self.counts, self.counts_wanted = counts, False

    def ended(self) -> None:
        """Note that the program is over."""
        self.waits = self.over = True

    def restored(self, losses: Mapping[int, float | None], evaluations: Iterable[EvaluationRecord]) -> None:
        """Take over losses and evaluations of the snapshot that the loop begins with; the broker may have lost them."""
        self.losses.update(losses)
        self.steps.extend(self._of_losses(losses))
        self.evaluations.extend(evaluations)

    def keep_loss(self, step: int, loss: float | None) -> None:
        """Keep the loss of `step`, which belongs into all later snapshots."""
        self.losses[step] = loss

    def durable(self, stage: int, step: int) -> None:
        """Note that a snapshot is on disk. For the thread that writes snapshots."""
        self.written.append((stage, step))
        self.snapshots.append((stage, step))

    def completed(self, step: int) -> None:
        """Note that the checkpoint of `step` is complete."""
        self.complete = max(step, self.complete)
        self.positions = {each: position for each, position in self.positions.items() if each >= self.complete}

    def takes(self, stage: int, held: HeldBytes) -> None:
        """Take the measured memory of `stage`."""
        self.stage_bytes[stage] = held

    @contextmanager
    def writing(self, what: str) -> Iterator[None]:
        """Return a context in which the loop waits until `what` written, such as "a snapshot is"."""
        before = self.waits
        self.waits, self.writes = True, what
        try:
            yield
        finally:
            self.waits, self.writes = before, ""

    def note_fault(self, source: str, fault: ResourceFault | None) -> None:
        """Note that `source` cannot do something now; with None, that it can. For any thread."""
        if fault is None:
            self.faults.pop(source, None)
        else:
            self.faults[source] = fault

    def noting(self, source: str) -> Note:
        """Return the function that takes the faults of `source`."""
        return partial(self.note_fault, source)

    def is_after(self, step: int, stage: int) -> bool:
        """Return True if `stage` has finished the steps before `step`, and begun nothing of the steps from there on."""
        instruction = self.instruction
        begun = not self.waits and instruction is not None and instruction.counted and instruction.step >= step
        return self.finished[stage] == step and not self.open[stage] and not begun

    def position(self, step: int) -> Position:
        """Return the position after `step` steps. It is always known in a run that no script calls.

        A scripted run that has not come there, or is beyond it, knows the step alone: nothing is trimmed then but what
        is counted by steps.
        """
        return self.positions.get(step) or self.position_after(step)

    def may_report(self, step: int) -> bool:
        """Return True if a snapshot of `step` may be in a checkpoint: the script has all replies up to there."""
        position = self.positions.get(step)  # a worker that begins there gives no reply to the calls before it
        return position is None or all(position.of(per) <= count for per, count in self.answered.items())

    @property
    def reportable(self) -> bool:
        """True if there is a snapshot to report."""
        return bool(self.snapshots) and self.may_report(self.snapshots[0][1])

    @property
    def held_back(self) -> bool:
        """True if there is a snapshot that cannot be reported yet."""
        return any(not self.may_report(step) for _, step in list(self.snapshots))

    @property
    def fault(self) -> ResourceFault | None:
        """The fault of a resource that cannot be used now; first of all the one that the loop waits for."""
        faults = list(self.faults.values())
        return next((fault for fault in faults if fault.blocks), faults[0] if faults else None)

    @property
    def trouble(self) -> Trouble | None:
        """The trouble that the queues have now."""
        return None if self.queues is None else self.queues.trouble

    def take_counts(self) -> QueueCounts:
        """Return the newest counts of the queues, and have these counted again. For the reader."""
        counts, self.counts_wanted = self.counts, True
        return counts

    def activity(self) -> Doing:
        """Return the present work of the loop. For the reader."""
        computing = None if self.waits else (self.since, self.full)
        busy = not self.waits and self.full is None and self.instruction is not None
        stage = self.instruction.op.action.stage if busy and self.instruction is not None else None
        return Doing(self._doing(), tuple(self._wanted()), computing, stage)

    def memory(self, run: str, index: int) -> WorkerRecord:
        """Return all that a broker which has lost its records must know at once. For the reader."""
        return WorkerRecord(run, index, self.complete, min(self.finished.values(), default=0), [*self.orders.known[0]])

    def records(self, steps: int | None) -> list[StepRecord]:
        """Return the records that a broker which has lost its own must have after `memory`. For the reader.

        They say how far each stage is, of the `steps` that are trained (None: as many as a script likes), with all
        losses.
        """
        losses = dict(self.losses) | dict([self.newest] if self.newest else [])
        trained = {stage: done if steps is None else min(done, steps) for stage, done in self.finished.items()}
        others = [(stage, done) for stage, done in trained.items() if stage != self.last]
        return [StepRecord(stage, done - 1, b"") for stage, done in others if done] + self._of_losses(losses)

    def _ended(self, now: float) -> None:
        self.actions += 1
        self.busy += (now if self.full is None else self.full) - self.since
        self.since, self.full = now, None
        self.idle.lap(now, WaitCause.EVALUATION)

    def _of_losses(self, losses: Mapping[int, float | None]) -> list[StepRecord]:
        return [StepRecord(self.last, step, b"", loss) for step, loss in sorted(losses.items())]

    def _doing(self) -> str:
        """Return the present work of the loop, in words."""
        fault, instruction, trouble = self.fault, self.instruction, self.trouble
        if self.writes:
            return f"{WAITS} until {self.writes} written"
        if fault is not None and fault.blocks:
            return f"{WAITS} to try again what failed"
        if self.over:
            return f"{WAITS} for the others to finish"
        if trouble is not None and (self.waits or self.full is not None):
            return f"{WAITS} for the server of its queues: {trouble.reason}"
        if self.waits and self.call is not None:
            return f"{WAITS} for {self.call.said}"
        if instruction is None:
            return f"{WAITS} for the other workers"
        action = str(instruction)
        if self.full is not None:
            return f"{WAITS} for room in {', '.join(instruction.gives)} to put what {action} gives"
        if not self.waits:
            return action
        if isinstance(self.lacking, AwaitCredit):
            return f"{WAITS} for credit in {', '.join(instruction.gives)} to run {action}"
        return f"{WAITS} for {' and '.join(instruction.takes)} to run {action}"

    def _wanted(self) -> Iterator[Wait]:
        """Yield the message, credit or room that the loop waits for, if it does."""
        if self.writes or self.over:
            return
        if self.waits and self.call is not None:
            call = self.call
            if call.queue:
                yield Wait(call.queue, call.number, call.name, call.number, self.since, call.lacks)
            return
        full, lacking = self.full, self.lacking
        if lacking is None or self.program is None or not (self.waits or full is not None):
            return
        instruction, since = lacking.instruction, self.since if full is None else full
        number = self.program.queues[lacking.queue].number(instruction.step, instruction.op.action.microbatch)
        late = Lack.MESSAGE if full is None else Lack.ROOM
        lacks = Lack.CREDIT if isinstance(lacking, AwaitCredit) else late
        yield Wait(lacking.queue, number, instruction.name, instruction.step, since, lacks)
