"""Runs one microbatch of one stage again, alone and in this process, and compares its bits with the recorded ones.

snapshot of step 100  ->  all that the stage did from there on, in silence  ->  2F5 and 2B5 of step 118, out loud
a bad microbatch, with the state in which its stage was  ------------------->
"""

import contextlib
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from stageline.broker.codec.message import Message, encode, fingerprint, read_header
from stageline.broker.queues.base import QueueKey
from stageline.pipeline.errors import StagelineError
from stageline.pipeline.exit_code import ExitCode
from stageline.pipeline.plan import Plan, from_mapping
from stageline.pipeline.schedule import Action, Kind
from stageline.pipeline.stage.state import StageState
from stageline.pipeline.tree import Tree, describe
from stageline.workers.checkpoint.directory import FOLDER, SnapshotDirectory
from stageline.workers.checkpoint.manifest import Origin, SnapshotDamaged
from stageline.workers.checkpoint.snapshot import read_snapshot
from stageline.workers.runtime.executor import ComputeFailed
from stageline.workers.runtime.job import Job, prepare
from stageline.workers.runtime.machine import Instruction, program
from stageline.workers.runtime.skipping import SkipLog, skipping

from .capture import gives
from .directory import ABOUT, About, NotRecorded, Place, Reason, RecordDirectory
from .directory import FOLDER as RECORDED
from .record_file import Direction, RecordedMessage


class NoSuchMicrobatch(StagelineError):
    """The run has no such stage, step or microbatch."""

    exit_code = ExitCode.USAGE


@dataclass(frozen=True, slots=True)
class Wanted:
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
class ReplayOutcome:
    """What an action on the microbatch came to: `found` in words; `same` as recorded, None if nothing is recorded."""

    action: str
    found: str
    same: bool | None


@dataclass(frozen=True, slots=True)
class Replayed:
    """A microbatch that was run again, from the snapshot of step `start`, after `before` other actions of its stage.

    `start` is None where the stage's state was kept with the microbatch. `reason` is why the microbatch stopped the
    run or was left out; `error` is what was raised this time.
    """

    run: str
    start: int | None
    before: int
    outcomes: Sequence[ReplayOutcome]
    reason: Reason | None = None
    error: ComputeFailed | None = None

    @property
    def reproduced(self) -> bool:
        """Whether all that can be compared is as it was in the run."""
        raised = self.reason.reason if self.reason is not None and self.reason.raised else None
        if self.error is not None or raised is not None:
            return str(self.error) == raised
        return all(outcome.same is not False for outcome in self.outcomes)


@dataclass(frozen=True, slots=True)
class _Path:
    """How to come to the microbatch: from which state, by carrying out what, with which messages."""

    start: int | None
    state: StageState | None  # None: as the model is made
    instructions: Sequence[Instruction]
    messages: Mapping[Place, RecordedMessage]


def replay(run: Path, wanted: Wanted, plan: Plan | None = None) -> Replayed:
    """Runs a microbatch of the run in the folder `run` again; what is not of it is silent, and passes breakpoints.

    `plan`: the run's own, as it is read now; without, as it was recorded. For this process alone, since it sets
    torch's threads. Raises `NotRecorded`, `RecordDamaged`, `SnapshotDamaged`, `NoSuchMicrobatch`, `PlanRefused`,
    `ModelRefused`, `DataError` or `ForeignState`, and `ComputeFailed` on the way to the microbatch.
    """
    about = _about(run, wanted.stage)
    recorded = from_mapping(about.plan, file=about.file or None)
    if plan is not None and plan.digest() != recorded.digest():
        raise NotRecorded(f"run {about.run} was made under another plan than this one; name its folder, {run}, instead")
    job = prepare(plan or recorded)
    _demand_existence(job, wanted)
    torch.set_num_threads(job.plan.workers[job.schedule.owner(wanted.stage)].threads)
    records = RecordDirectory(run, wanted.stage)
    path = _path(job, records, wanted, Origin(about.run, job.plan.digest()))
    place = (wanted.stage, wanted.step, wanted.microbatch)
    decisions = SkipLog(run, again=place)
    reason = records.reason(wanted.step, wanted.microbatch) or _reason_of(decisions.reason(place), wanted)
    return _walk(job, path, wanted, about.run, reason, decisions)


def _reason_of(skipped: str | None, wanted: Wanted) -> Reason | None:
    action = Action(Kind.FORWARD, wanted.stage, wanted.microbatch)
    return None if skipped is None else Reason(action=str(action), raised=True, reason=skipped)


def _about(run: Path, stage: int) -> About:
    """Of this stage, or of any that can say what stages there are."""
    try:
        return RecordDirectory(run, stage).about()
    except NotRecorded:
        others = sorted((run / RECORDED).glob(f"stage-*/{ABOUT}"))
        if not others:
            raise NotRecorded(
                f'run {run.resolve().name} has recorded nothing. recovery.record = "bad" records what stops a run, '
                '"all" every microbatch since the last but one checkpoint'
            ) from None
        return RecordDirectory(run, int(others[0].parent.name.partition("-")[2])).about()


def _demand_existence(job: Job, wanted: Wanted) -> None:
    bounds = {"stage": job.route.stages, "step": job.steps, "microbatch": job.schedule.microbatches}
    for name, count in bounds.items():
        if not 0 <= getattr(wanted, name) < count:
            raise NoSuchMicrobatch(f"there is no {name} {getattr(wanted, name)}: the run has {name}s 0 to {count - 1}")


def _path(job: Job, records: RecordDirectory, wanted: Wanted, origin: Origin) -> _Path:
    messages = records.messages()
    checkpoints = SnapshotDirectory(records.run / FOLDER, origin)
    damages: list[str] = []
    starts = [step for step in checkpoints.steps(wanted.stage) if 0 < step <= wanted.step]
    for start in [*reversed(starts), 0]:
        instructions = _reach(job, wanted, start, messages)
        if not instructions:
            continue
        if not start:
            return _Path(0, None, instructions, messages)
        try:
            return _Path(start, checkpoints.load(wanted.stage, start).state, instructions, messages)
        except SnapshotDamaged as damage:
            damages.append(str(damage))
    if (reason := records.reason(wanted.step, wanted.microbatch)) is not None:
        return _path_of_bad(job, records, wanted, reason, origin)
    raise NotRecorded("; ".join([_absence(records, wanted, messages), *damages]))


def _path_of_bad(job: Job, records: RecordDirectory, wanted: Wanted, reason: Reason, origin: Origin) -> _Path:
    """Its messages and the stage's state were kept with it."""
    state = read_snapshot(records.bad(wanted.step, wanted.microbatch), wanted.stage, wanted.step, origin).state
    forward = Action(Kind.FORWARD, wanted.stage, wanted.microbatch)
    actions = (forward,) if reason.action == str(forward) else (forward, forward._replace(kind=Kind.BACKWARD))
    instructions = [Instruction(wanted.step, each, job.route.takes(each), job.route.gives(each)) for each in actions]
    messages = records.messages_of_bad(wanted.step, wanted.microbatch)
    for instruction in instructions:
        if not _is_recorded(instruction, messages):
            raise NotRecorded(f"what {instruction} took is missing in {records.bad(wanted.step, wanted.microbatch)}")
    return _Path(None, state, instructions, messages)


def _reach(job: Job, wanted: Wanted, start: int, messages: Mapping[Place, RecordedMessage]) -> list[Instruction]:
    """What the stage does from `start` to its last action on the microbatch of which all is recorded, none if it does
    not come to its forward."""
    worker, last = job.schedule.owner(wanted.stage), Kind.FORWARD
    if wanted.stage >= job.route.first_trainable:
        last = Kind.BACKWARD
    reached: list[Instruction] = []
    end = 0
    for instruction in program(job.schedule, job.route, worker, range(start, job.steps)):
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
    return all(_place(Direction.TAKEN, key, instruction) in messages for key in instruction.takes)


def _place(way: Direction, key: QueueKey, instruction: Instruction) -> Place:
    return way, key, instruction.step, instruction.action.microbatch


def _absence(records: RecordDirectory, wanted: Wanted, messages: Mapping[Place, RecordedMessage]) -> str:
    what = f"microbatch {wanted.microbatch} of step {wanted.step} of stage {wanted.stage}"
    steps = [step for _, _, step, _ in messages]
    there = f"messages of the steps {min(steps)} to {max(steps)}" if steps else "no messages"
    bad = [path.name for path in sorted(records.folder.glob("bad-*"))]
    besides = f" and {', '.join(bad)}" if bad else ""
    return f"{what} cannot be run again: recorded are {there}{besides}, and what it needs is not, or has no snapshot"


def _walk(job: Job, path: _Path, wanted: Wanted, run: str, reason: Reason | None, decisions: SkipLog) -> Replayed:
    executor = job.executor_of([wanted.stage])
    carrier = skipping(executor, job.plan, decisions, job.route.stages - 1)
    if path.state is not None:
        executor.stages[wanted.stage].restore(path.state)
    before = sum(not wanted.is_of(instruction) for instruction in path.instructions)
    outcomes: list[ReplayOutcome] = []
    for instruction in path.instructions:
        received = [
            path.messages[_place(Direction.TAKEN, key, instruction)].load().payload for key in instruction.takes
        ]
        if not wanted.is_of(instruction):
            with _in_silence():
                carrier.carry_out(instruction, received)
            continue
        try:
            result = carrier.carry_out(instruction, received)
        except ComputeFailed as error:
            return Replayed(run, path.start, before, outcomes, reason, error)
        outcomes.append(_outcome(instruction, result, run, path.messages))
    return Replayed(run, path.start, before, outcomes, reason)


def _outcome(
    instruction: Instruction, result: Tree, run: str, messages: Mapping[Place, RecordedMessage]
) -> ReplayOutcome:
    key, action = gives(instruction.action), str(instruction.action)
    if key is None:
        return ReplayOutcome(action, "nothing: no stage is before it", None)
    entry = messages.get(_place(Direction.GIVEN, key, instruction))
    place = run, key.flow, instruction.step, instruction.action.microbatch, key.stage, 0, 0
    bits = fingerprint(read_header(encode(Message(*place, result))[0]))
    return ReplayOutcome(action, _in_words(result), None if entry is None else bits == fingerprint(entry.header))


def _in_words(result: Tree) -> str:
    if isinstance(result, Tensor) and result.numel() == 1:
        return f"{describe(result)} {result.item():.9g}"
    return describe(result)


@contextlib.contextmanager
def _in_silence() -> Iterator[None]:
    """What a user's code prints is not shown, and `breakpoint()` does nothing."""
    before = sys.breakpointhook
    sys.breakpointhook = lambda *words, **options: None
    try:
        with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere):
            yield
    finally:
        sys.breakpointhook = before
