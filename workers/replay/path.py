"""Finds how to come to a recorded microbatch: from which state, by which instructions, with which messages."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from stageline.broker.queues.base import QueueKey
from stageline.pipeline.schedule import Action, Kind
from stageline.pipeline.stage.state import StageState
from stageline.workers.checkpoint.directory import FOLDER, SnapshotDirectory
from stageline.workers.checkpoint.manifest import Origin, SnapshotDamaged
from stageline.workers.checkpoint.snapshot import read_snapshot
from stageline.workers.runtime.job import Job
from stageline.workers.runtime.program import Instruction

from .directory import NotRecorded, Place, Reason, RecordDirectory
from .record_file import Direction, RecordedMessage


@dataclass(frozen=True, slots=True)
class ReplayTarget:
    """One microbatch of one stage."""

    stage: int
    step: int
    microbatch: int

    def is_of(self, instruction: Instruction) -> bool:
        """Whether `instruction` is a forward or a backward of it."""
        action = instruction.action
        mine = (action.stage, instruction.step, action.microbatch) == (self.stage, self.step, self.microbatch)
        return mine and action.kind is not Kind.UPDATE


@dataclass(frozen=True, slots=True)
class ReplayPath:
    """How to come to the microbatch: from which state, by carrying out what, with which messages."""

    start: int | None
    state: StageState | None  # None: as the model is made
    instructions: Sequence[Instruction]
    messages: Mapping[Place, RecordedMessage]


def find_path(job: Job, records: RecordDirectory, wanted: ReplayTarget, origin: Origin) -> ReplayPath:
    """The path from the newest usable snapshot, or from the state that is recorded with a bad microbatch.

    Raises `NotRecorded`, `RecordDamaged` and `SnapshotDamaged`.
    """
    messages = records.messages()
    checkpoints = SnapshotDirectory(records.run / FOLDER, origin)
    damages: list[str] = []
    starts = [step for step in checkpoints.steps(wanted.stage) if 0 < step <= wanted.step]
    for start in [*reversed(starts), 0]:
        instructions = _reach(job, wanted, start, messages)
        if not instructions:
            continue
        if not start:
            return ReplayPath(0, None, instructions, messages)
        try:
            return ReplayPath(start, checkpoints.load(wanted.stage, start).state, instructions, messages)
        except SnapshotDamaged as damage:
            damages.append(str(damage))
    if (reason := records.reason(wanted.step, wanted.microbatch)) is not None:
        return _path_of_bad(job, records, wanted, reason, origin)
    raise NotRecorded("; ".join([_absence(records, wanted, messages), *damages]))


def _path_of_bad(
    job: Job, records: RecordDirectory, wanted: ReplayTarget, reason: Reason, origin: Origin
) -> ReplayPath:
    """The path from the state and the messages that are recorded with the microbatch itself."""
    state = read_snapshot(records.bad(wanted.step, wanted.microbatch), wanted.stage, wanted.step, origin).state
    forward = Action(Kind.FORWARD, wanted.stage, wanted.microbatch)
    actions = (forward,) if reason.action == str(forward) else (forward, forward._replace(kind=Kind.BACKWARD))
    instructions = [Instruction(wanted.step, each, job.route.takes(each), job.route.gives(each)) for each in actions]
    messages = records.messages_of_bad(wanted.step, wanted.microbatch)
    for instruction in instructions:
        if not _is_recorded(instruction, messages):
            raise NotRecorded(f"what {instruction} took is missing in {records.bad(wanted.step, wanted.microbatch)}")
    return ReplayPath(None, state, instructions, messages)


def _reach(job: Job, wanted: ReplayTarget, start: int, messages: Mapping[Place, RecordedMessage]) -> list[Instruction]:
    """What the stage does from `start` to the last action on the microbatch whose inputs are all recorded; nothing if
    that leaves out its forward."""
    worker, last = job.schedule.owner(wanted.stage), Kind.FORWARD
    if wanted.stage >= job.route.first_trainable:
        last = Kind.BACKWARD
    reached: list[Instruction] = []
    end = 0
    for instruction in job.program.instructions(worker, start):
        if instruction.action.stage != wanted.stage:
            continue
        if not _is_recorded(instruction, messages):
            break
        reached.append(instruction)
        if wanted.is_of(instruction):
            end = len(reached)
            if instruction.action.kind is last:
                break
    return reached[:end]


def _is_recorded(instruction: Instruction, messages: Mapping[Place, RecordedMessage]) -> bool:
    return all(place_of(Direction.TAKEN, key, instruction) in messages for key in instruction.takes)


def place_of(direction: Direction, key: QueueKey, instruction: Instruction) -> Place:
    return direction, key, instruction.step, instruction.action.microbatch


def _absence(records: RecordDirectory, wanted: ReplayTarget, messages: Mapping[Place, RecordedMessage]) -> str:
    what = f"microbatch {wanted.microbatch} of step {wanted.step} of stage {wanted.stage}"
    steps = [step for _, _, step, _ in messages]
    there = f"messages of the steps {min(steps)} to {max(steps)}" if steps else "no messages"
    bad = [path.name for path in sorted(records.folder.glob("bad-*"))]
    besides = f" and {', '.join(bad)}" if bad else ""
    return f"{what} cannot be run again: recorded are {there}{besides}, and what it needs is not, or has no snapshot"
