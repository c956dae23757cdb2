"""Records what a worker's stages take and give, so that a microbatch can be run again alone.

record = "all"    the compute loop  --record(stage, direction, message)-->  RecordWriter's thread  -->  disk
                  Records are kept for as long as snapshots: since the complete checkpoint before the newest, so that a
                  run that has just completed a checkpoint, or has finished, can still be replayed.
record = "bad"    `explain` writes the microbatch that stops the run, with the stage's state. This costs nothing
                  before a microbatch fails: its messages are still retained by their producers, which deliver them
                  again after a rewind.
"""

import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, suppress
from functools import partial
from pathlib import Path
from shlex import quote
from time import monotonic
from typing import BinaryIO

import structlog

from stageline.broker.codec.message import Message, encode
from stageline.broker.errors import BrokerError
from stageline.broker.queues.base import Queues
from stageline.pipeline.errors import GroupLost
from stageline.pipeline.feature import Compute
from stageline.pipeline.plan import Plan
from stageline.pipeline.program import CacheUse, Instruction, Queue
from stageline.pipeline.retry import Note
from stageline.pipeline.schedule import Action, Kind
from stageline.pipeline.stage.layers.memory import own_copy
from stageline.pipeline.stage.stage import Stage
from stageline.pipeline.tree import Tree, map_tensors, tensors
from stageline.workers.checkpoint.snapshot import Origin, Snapshot, write_snapshot
from stageline.workers.disk.atomic_file import draft_of, publish, sync, write_json
from stageline.workers.disk.background_writer import BackgroundWriter
from stageline.workers.disk.tensor_file import Unsaveable
from stageline.workers.runs import folder as runs
from stageline.workers.runtime.job import Job
from stageline.workers.runtime.loop import PATIENCE
from stageline.workers.runtime.losses import ComputeFailed, Culprit
from stageline.workers.runtime.worker_feature import WorkerFeature, WorkerPlace

from .records import MESSAGES, REASON, Direction, Reason, RecordDirectory, write_entry

BACKLOG = 256 * 2**20  # bytes that may wait to be written; then the compute loop waits too
LONGEST = 5.0  # seconds that the producers have to deliver the messages of a bad microbatch again

log = structlog.get_logger()


class RecordWriter(AbstractContextManager["RecordWriter"]):
    """Writer of the records of `stages` in a thread of its own, while the compute loop goes on.

    There is one file for the steps between two snapshots. Tensors that are handed over must not be written to any more.

    A record that cannot be written ends the recording, not the run. A fault that may pass ends it only when no more
    records can wait, or after a minute.
    """

    def __init__(
        self,
        plan: Plan,
        run: str,
        stages: Iterable[int],
        incarnation: int,
        start: int,
        note: Note = lambda fault: None,
    ) -> None:
        """Start the thread, and write which run the records are of. No other writer may have the same `incarnation`.

        Args:
            plan: Plan of the run.
            run: Identifier of the run.
            stages: Stages of this worker.
            incarnation: Number of this incarnation, part of the files' names.
            start: First step that this incarnation computes.
            note: Called with a fault of the disk while it lasts.
        """
        self._run = run
        self._incarnation = incarnation
        self._records = {stage: RecordDirectory(runs.folder(plan, run), stage) for stage in stages}
        self._start = start
        self._microbatches = plan.schedule.in_step
        self._every = plan.recovery.snapshot_every  # a file holds the steps between two snapshots
        self._files: dict[Path, BinaryIO] = {}
        self._what = f"record messages in {runs.folder(plan, run)}"
        self._ends: dict[Path, int] = {}  # how long the files are, of those that were closed after a fault
        self._writer = BackgroundWriter("recorder", BACKLOG, self._fail, note=note, patience=False)
        for records in self._records.values():
            self._writer.submit(partial(records.describe, run, plan), what=self._what)

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        """Close the writer. After an error, wait longer for the records that explain it."""
        self.close(PATIENCE if error is None else 4 * PATIENCE)

    def record(self, stage: int, direction: Direction, message: Message) -> None:
        """Hand a message over to be written. Return at once unless the disk is more than `BACKLOG` bytes behind.

        Args:
            stage: Stage that took or gave the message.
            direction: Taken messages are written in full, given ones as their header alone.
            message: The message; its tensors must not be written to any more.
        """
        size = sum(tensor.nbytes for tensor in tensors(message.payload)) if direction is Direction.TAKEN else 0
        self._writer.submit(partial(self._write, stage, direction, message), size=size, what=self._what)

    def delete_before(self, complete: int) -> None:
        """Delete the records of steps before `complete`. Return at once."""
        self._writer.submit(partial(self._delete_before, complete), what=self._what)

    def close(self, timeout: float | None = None) -> None:
        """Wait until all records are written, for up to `timeout` seconds. The thread goes on after that."""
        self._writer.submit(self._close_files)
        self._writer.close(timeout, drop=False)

    def _write(self, stage: int, direction: Direction, message: Message) -> None:
        frames = encode(message)
        step = message.number // self._microbatches
        begin = max(self._start, step - step % self._every)
        path = self._records[stage].segment(begin, self._incarnation)
        if path not in self._files:
            self._files[path] = self._open(path)
        file, end = self._files[path], self._files[path].tell()
        try:
            write_entry(file, direction, frames if direction is Direction.TAKEN else frames[:1])
        except OSError:
            self._ends[path] = end
            with suppress(OSError):  # what could not be written
                self._files.pop(path).close()
            raise

    def _open(self, path: Path) -> BinaryIO:
        """Open a file without the entry that a fault has cut off."""
        end = self._ends.get(path, 0)
        file = path.open("r+b" if end else "wb")
        file.truncate(end)
        file.seek(end)
        return file

    def _delete_before(self, complete: int) -> None:
        for records in self._records.values():
            for begin, path in records.segments():
                if (begin // self._every + 1) * self._every <= complete:
                    if path in self._files:
                        self._files.pop(path).close()
                    path.unlink(missing_ok=True)

    def _fail(self, error: Exception) -> None:
        log.warning("recording ends", reason=str(error))
        self._close_files()

    def _close_files(self) -> None:
        while self._files:
            with suppress(OSError):  # a full disk was reported when it was written to
                self._files.popitem()[1].close()


def taken_queues(instruction: Instruction) -> tuple[str, ...]:
    """Return the names of the queues under which an instruction's inputs are recorded.

    Rows that are replayed from a cache once came from the stage before. Results are recorded under `Action.outbound`:
    the loss as if a stage came after the last, and the gradient of a stage whose producer does not train as if it did.
    """
    replayed = CacheUse.REPLAYED in instruction.op.marks
    flows = ["forward"] if replayed else [name.partition("-")[0] for name in instruction.takes]
    return tuple(f"{flow}-{instruction.action.stage}" for flow in flows)


def number_of(job: Job, step: int, action: Action) -> int:
    """Return the number under which messages are recorded: `step * microbatches + microbatch`.

    Args:
        job: Job with the schedule.
        step: Step of the action.
        action: Action that takes or gives the messages.
    """
    return step * job.schedule.microbatches + action.microbatch


class Recorder(WorkerFeature):
    """Feature that records the microbatch that stops the run and, with a `writer`, all inputs and results of stages."""

    name = "recorder"
    only_trains = True

    def __init__(self, place: WorkerPlace, writer: RecordWriter | None) -> None:
        """Create the feature for the worker at `place`. Without a `writer`, only a bad microbatch is recorded."""
        self._place = place
        self._writer = writer

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        """Close the writer, if there is one. After an error, wait longer for the records that explain it."""
        if self._writer is not None:
            self._writer.close(PATIENCE if error is None else 4 * PATIENCE)

    def around(self, stage: Stage, kind: str, compute: Compute) -> Compute:
        """Return `compute`, wrapped so that inputs and results are recorded. Evaluation is not recorded.

        Args:
            stage: Stage that is computed.
            kind: Kind of its actions.
            compute: Function that carries out an instruction.
        """
        if (writer := self._writer) is None:
            return compute

        def recorded(instruction: Instruction, received: Sequence[Tree]) -> Tree:
            index = instruction.action.stage
            for queue, payload in zip(taken_queues(instruction), received, strict=True):
                before = map_tensors(own_copy, payload)  # a layer may write to its input
                writer.record(index, Direction.TAKEN, _recorded(self._place, queue, instruction, before))
            result = compute(instruction, received)
            if given := instruction.action.outbound:
                writer.record(index, Direction.GIVEN, _recorded(self._place, given, instruction, result))
            return result

        return recorded

    def forget(self, step: int) -> None:
        """Delete the records of steps before `step`."""
        if self._writer is not None:
            self._writer.delete_before(step)

    def explain(self, error: ComputeFailed, features: Sequence[WorkerFeature]) -> str:
        """Record the microbatch that failed; return how to replay it, or why it could not be recorded.

        Returns "" if `error` is not about one microbatch, or if the run is a script's, which cannot be replayed.
        """
        culprit = error.culprit
        if culprit is None or self._place.job.plan.scripted:
            return ""
        try:
            folder = _record(self._place, culprit, str(error), features)
        except (OSError, Unsaveable, BrokerError, TimeoutError, GroupLost) as problem:
            return f"The microbatch could not be recorded: {problem}"
        stage, microbatch = culprit.action.stage, culprit.action.microbatch
        at = f"--stage {stage} --step {culprit.step} --microbatch {microbatch}"
        return f"It is recorded. To run it again, alone: stageline replay {quote(str(folder))} {at}"


def _recorded(place: WorkerPlace, queue: str, instruction: Instruction, payload: Tree) -> Message:
    number = number_of(place.job, instruction.step, instruction.action)
    return Message(place.run, queue, number, place.incarnation, payload)


def recorder(place: WorkerPlace) -> Recorder | None:
    """Return the recorder that the plan asks for; None for none.

    A script's run has one only for `record = "all"`: a replay does not have the objects of a script.
    """
    record, note = place.job.plan.recovery.record, place.progress.noting("records")
    if record == "none" or (place.job.plan.scripted and record != "all"):
        return None
    if record != "all":
        return Recorder(place, None)
    stages = place.job.schedule.placement[place.worker]
    return Recorder(place, RecordWriter(place.job.plan, place.run, stages, place.incarnation, place.start, note))


def _record(place: WorkerPlace, culprit: Culprit, reason: str, features: Sequence[WorkerFeature]) -> Path:
    """Write the folder of the microbatch that failed, and return the folder of the run."""
    job, run, incarnation, plan = place.job, place.run, place.incarnation, place.job.plan
    stage, step, microbatch = culprit.action.stage, culprit.step, culprit.action.microbatch
    records = RecordDirectory(runs.folder(plan, run), stage)
    folder = records.bad(step, microbatch)
    draft = draft_of(folder)
    try:
        draft.mkdir(parents=True)
        state = place.executor.stages[stage].state()
        write_snapshot(draft, Snapshot(stage, step, incarnation, state), Origin(run, plan.digest()))
        with (draft / MESSAGES).open("wb") as file:
            for taken in _inputs(place, culprit, features):
                write_entry(file, Direction.TAKEN, encode(taken))
            if culprit.gave is not None and culprit.action.outbound:
                number = number_of(job, step, culprit.action)
                given = Message(run, culprit.action.outbound, number, incarnation, culprit.gave)
                write_entry(file, Direction.GIVEN, encode(given)[:1])
        sync(draft / MESSAGES)
        write_json(draft / REASON, Reason(action=str(culprit.action), raised=culprit.gave is None, reason=reason))
        records.describe(run, plan)
        shutil.rmtree(folder, ignore_errors=True)
        publish(draft, folder)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return records.run


def _inputs(place: WorkerPlace, culprit: Culprit, features: Sequence[WorkerFeature]) -> Iterator[Message]:
    """Yield the inputs of the stage for the microbatch, up to the action that failed.

    For an input that a feature gave in place of a message, the message that would have been sent is yielded.
    """
    job, action, step, deadline = place.job, culprit.action, culprit.step, monotonic() + LONGEST
    forward = job.program.instruction(step, Action(Kind.FORWARD, action.stage, action.microbatch))
    for given in (feature.cached_input(forward) for feature in features):
        if given is not None:
            yield _recorded(place, taken_queues(forward)[0], forward, given)
    later = [job.program.instruction(step, each) for each in action.way[1:]]
    for instruction in ((forward,) if forward.takes else ()) + tuple(later):
        for name, queue in zip(instruction.takes, taken_queues(instruction), strict=True):
            payload = _taken_again(place.queues, job.program.queues[name], step, action.microbatch, deadline)
            yield _recorded(place, queue, instruction, payload)


def _taken_again(queues: Queues, queue: Queue, step: int, microbatch: int, deadline: float) -> Tree:
    """Return the payload of a message that the producer delivers again after a rewind.

    Args:
        queues: Queues of this worker.
        queue: Queue that brought the message.
        step: Step of the message.
        microbatch: Microbatch of the message.
        deadline: Monotonic time in seconds.

    Raises:
        TimeoutError: The message has not arrived at `deadline`.
    """
    inbound, number = queues.inbound(queue), queue.number(step, microbatch)
    inbound.rewind(step)
    while (left := deadline - monotonic()) > 0:
        message = inbound.take(min(left, PATIENCE))
        if message is not None and message.number == number:
            return message.payload
    raise TimeoutError(f"{queue.name} did not deliver it again within {LONGEST:g} s")
