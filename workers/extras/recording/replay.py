"""Runs one microbatch of one stage again, alone and in this process, and compares its bits with the recorded ones.

snapshot of step 100  ->  everything the stage did from there on, with output off  ->  2F5 and 2B5 of step 118
a bad microbatch, recorded with the state of its stage  --------------------------->
"""

import contextlib
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import NamedTuple

import torch

from stageline.broker.codec.message import Message, encode, fingerprint, read_header
from stageline.pipeline.errors import ExitCode, StagelineError
from stageline.pipeline.plan import Plan, from_mapping
from stageline.pipeline.program import Instruction
from stageline.pipeline.schedule import ENDS_MICROBATCH, PER_MICROBATCH, Action, Kind
from stageline.pipeline.stage.stage_state import StageState
from stageline.pipeline.tree import Tree, describe
from stageline.workers.checkpoint.directory import FOLDER as CHECKPOINTS
from stageline.workers.checkpoint.directory import SnapshotDirectory
from stageline.workers.checkpoint.snapshot import Origin, SnapshotDamaged, read_snapshot
from stageline.workers.runtime.job import Job, prepare
from stageline.workers.runtime.losses import ComputeFailed

from .recorder import number_of, taken_queues
from .records import MESSAGES, Direction, NotRecorded, Place, Reason, RecordDirectory, RecordedMessage, messages_in
from .skipping import SkipLog, Skipping, leaves_out

_REPLAYED = PER_MICROBATCH - {Kind.TIED}  # the others compute nothing of a microbatch


class NoSuchMicrobatch(StagelineError):
    """Error that the run does not have the stage, step or microbatch to replay.

    Mend: Name one in the range that the message gives.

    Example: there is no stage 4: the run has stages 0 to 1
    """

    error_code = "SL411"
    exit_code = ExitCode.USAGE


class ReplayTarget(NamedTuple):
    """Microbatch of one stage, to be replayed."""

    stage: int
    step: int
    microbatch: int

    def is_of(self, instruction: Instruction) -> bool:
        """Return True if `instruction` is a forward or a backward of this microbatch."""
        action = instruction.action
        return (action.stage, instruction.step, action.microbatch) == self and action.kind in _REPLAYED


@dataclass(frozen=True, slots=True)
class ReplayPath:
    """Path to the microbatch: the state to begin with, the instructions, and their messages."""

    start: int | None
    state: StageState | None  # None: as the model is made
    instructions: Sequence[Instruction]
    messages: Mapping[Place, RecordedMessage]


@dataclass(frozen=True, slots=True)
class ReplayOutcome:
    """Result of one action: a description in `found`, and whether it has the recorded bits.

    `same` is None if none are recorded.
    """

    action: str
    found: str
    same: bool | None


@dataclass(frozen=True, slots=True)
class Replayed:
    """Outcome of replaying a microbatch from the snapshot of step `start`, after `before` other actions of its stage.

    `start` is None if the stage's state was recorded with the microbatch. `reason` is why the microbatch stopped the
    run or was skipped; `error` is what was raised this time.
    """

    run: str
    start: int | None
    before: int
    outcomes: Sequence[ReplayOutcome]
    reason: Reason | None = None
    error: ComputeFailed | None = None

    @property
    def reproduced(self) -> bool:
        """True if everything that can be compared is as it was in the run."""
        raised = self.reason.reason if self.reason is not None and self.reason.raised else None
        if self.error is not None or raised is not None:
            return str(self.error) == raised
        return all(outcome.same is not False for outcome in self.outcomes)

    @property
    def beginning(self) -> str:
        """State from which the microbatch was replayed, for people."""
        if self.start is None:
            return "from the state in which the run stopped"
        origin = f"the snapshot of step {self.start}" if self.start else "the weights that the run began with"
        return f"from {origin}, after {self.before} other action{'' if self.before == 1 else 's'} of the stage"

    @property
    def notes(self) -> dict[str, str]:
        """Reason why the microbatch stopped the run ("in the run"), and the error of this time ("now"), if any."""
        before = {} if self.reason is None else {"in the run": self.reason.reason}
        return before if self.error is None else {**before, "now": str(self.error)}

    @property
    def verdict(self) -> str:
        """Reason why the microbatch was not reproduced, for people."""
        if self.error is not None:
            return str(self.error)
        if self.reason is not None and self.reason.raised:
            return "it failed in the run and does not now: the code has changed, or it is not deterministic"
        return (
            "the bits are not the recorded ones: something is not deterministic, or the code, software or hardware "
            "differ"
        )


def recorded_plan(run: Path, stage: int) -> Plan:
    """Return the plan with which `stage` was recorded; it names the code that `replay` executes.

    Raises:
        NotRecorded: The run has recorded nothing.
        RecordDamaged: The description of the records cannot be read.
        PlanRefused: The recorded plan is not valid.
    """
    about = RecordDirectory(run, stage).about()
    return from_mapping(about.plan, file=about.file or None)


def replay(run: Path, wanted: ReplayTarget, plan: Plan | None = None, exported: Sequence[Path] = ()) -> Replayed:
    """Replay a microbatch of the run in the folder `run`.

    Actions before the microbatch print nothing and skip breakpoints. Sets torch's number of threads.

    Args:
        run: Folder of the run.
        wanted: Stage, step and microbatch.
        plan: Plan of the run as it is read now. By default the recorded plan is used.
        exported: Files of messages that queues of the run have retained, besides what is recorded. With them, a run
            that has recorded nothing needs `plan`.

    Raises:
        NotRecorded: The messages up to the microbatch are not recorded, or `plan` is another plan than the run's.
        RecordDamaged: A file of records is damaged.
        SnapshotDamaged: The state recorded with a bad microbatch is damaged.
        NoSuchMicrobatch: The run has no such stage, step or microbatch.
        PlanRefused: The plan is not valid.
        ModelRefused: The model cannot be made.
        DataError: The data cannot be read.
        ForeignState: The recorded state is of another model.
        ComputeFailed: An action before the microbatch failed.
    """
    records = RecordDirectory(run, wanted.stage)
    name, recorded = _recorded(run, wanted.stage, plan if exported else None)
    if plan is not None and plan.digest() != recorded.digest():
        raise NotRecorded(f"run {name} was made under another plan than this one; name its folder, {run}, instead")
    job = prepare(plan or recorded)
    _require_existence(job, wanted)
    torch.set_num_threads(job.plan.workers[job.schedule.owner(wanted.stage)].threads)
    path = _find_path(job, records, wanted, Origin(name, job.plan.digest()), _exported(job, exported))
    decisions = SkipLog(run, again=wanted)
    reason = records.reason(wanted.step, wanted.microbatch)
    if reason is None and (skipped := decisions.reason(wanted)) is not None:
        reason = Reason(action=str(Action(Kind.FORWARD, wanted.stage, wanted.microbatch)), raised=True, reason=skipped)
    return _run(job, path, wanted, name, reason, decisions)


def _recorded(run: Path, stage: int, plan: Plan | None) -> tuple[str, Plan]:
    """Return the id and the plan of a run; where nothing is recorded, `plan` is the plan. Raises `NotRecorded`."""
    try:
        return RecordDirectory(run, stage).about().run, recorded_plan(run, stage)
    except NotRecorded:
        if plan is None:
            raise
        return run.resolve().name, plan


def _exported(job: Job, files: Sequence[Path]) -> dict[Place, RecordedMessage]:
    """Return exported messages under the names by which records have them: each was taken, and given before.

    Raises:
        NotRecorded: A file has messages of a queue that the plan does not have.
    """
    found: dict[Place, RecordedMessage] = {}
    for (direction, name, number), entry in messages_in(files).items():
        queue = job.program.queues.get(name)
        if queue is None or queue.target is None:
            raise NotRecorded(f"{entry.file} has messages of {name}, which no stage of this plan takes from")
        step, microbatch = queue.at(number)
        place = f"{queue.flow}-{queue.target}", step * job.schedule.microbatches + microbatch
        found[direction, *place] = found[Direction.GIVEN, *place] = entry
    return found


def _require_existence(job: Job, wanted: ReplayTarget) -> None:
    bounds = {"stage": job.schedule.copies, "step": job.steps, "microbatch": job.schedule.microbatches}
    for name, count in bounds.items():
        if not 0 <= getattr(wanted, name) < count:
            raise NoSuchMicrobatch(f"there is no {name} {getattr(wanted, name)}: the run has {name}s 0 to {count - 1}")
    replicas = job.schedule.replicas
    if wanted.microbatch not in replicas.groups[wanted.stage]:
        copy = replicas.having(replicas.stage(wanted.stage), wanted.microbatch)
        raise NoSuchMicrobatch(
            f"stage {replicas.label(wanted.stage)} has no microbatch {wanted.microbatch}: replica "
            f"{replicas.label(copy)} has it; use --stage {copy}"
        )


def _find_path(
    job: Job,
    records: RecordDirectory,
    wanted: ReplayTarget,
    origin: Origin,
    exported: Mapping[Place, RecordedMessage],
) -> ReplayPath:
    """Return the path from the newest usable snapshot, or from the state that is recorded with a bad microbatch.

    Raises:
        NotRecorded: Messages on the way are missing.
        RecordDamaged: A file of records is damaged.
        SnapshotDamaged: The state recorded with a bad microbatch is damaged.
    """
    messages = {**exported, **records.messages()}
    checkpoints = SnapshotDirectory(records.run / CHECKPOINTS, origin)
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
    raise NotRecorded("; ".join([_absence(job, records, wanted, messages), *damages]))


def _path_of_bad(
    job: Job, records: RecordDirectory, wanted: ReplayTarget, reason: Reason, origin: Origin
) -> ReplayPath:
    """Return the path from the state and the messages that are recorded with the bad microbatch."""
    folder = records.bad(wanted.step, wanted.microbatch)
    state = read_snapshot(folder, wanted.stage, wanted.step, origin).state
    of_the_microbatch = (Action(kind, wanted.stage, wanted.microbatch) for kind in Kind)
    failed = next((each for each in of_the_microbatch if str(each) == reason.action), None)
    if failed is None:
        raise NotRecorded(f"{reason.action}, which failed, is an operation of a feature: it cannot be run again alone")
    instructions = [job.program.instruction(wanted.step, each) for each in failed.way]
    messages = messages_in([folder / MESSAGES])
    for instruction in instructions:
        if not _is_recorded(job, instruction, messages):
            raise NotRecorded(f"what {instruction} took is missing in {folder}")
    return ReplayPath(None, state, instructions, messages)


def _reach(job: Job, wanted: ReplayTarget, start: int, messages: Mapping[Place, RecordedMessage]) -> list[Instruction]:
    """Return the instructions of the stage from step `start` up to the last action on the microbatch.

    The list ends at the last action whose inputs, and those of all actions before it, are recorded. It is empty if the
    microbatch's forward cannot be reached. Evaluation is left out: it changes no state, and is not recorded.
    """
    program = job.program.instructions(job.schedule.owner(wanted.stage), range(start, job.steps))
    of_the_stage = (each for each in program if each.action.stage == wanted.stage)
    last = ENDS_MICROBATCH if job.schedule.trains(wanted.stage) else (Kind.FORWARD,)
    reached: list[Instruction] = []
    end = 0
    for instruction in takewhile(lambda each: _is_recorded(job, each, messages), of_the_stage):
        reached.append(instruction)
        if wanted.is_of(instruction):
            end = len(reached)
            if instruction.action.kind in last:
                break
    return reached[:end]


def _is_recorded(job: Job, instruction: Instruction, messages: Mapping[Place, RecordedMessage]) -> bool:
    number = number_of(job, instruction.step, instruction.action)
    return all((Direction.TAKEN, queue, number) in messages for queue in taken_queues(instruction))


def _absence(
    job: Job, records: RecordDirectory, wanted: ReplayTarget, messages: Mapping[Place, RecordedMessage]
) -> str:
    what = f"microbatch {wanted.microbatch} of step {wanted.step} of stage {wanted.stage}"
    steps = [number // job.schedule.microbatches for _, _, number in messages]
    there = f"messages of the steps {min(steps)} to {max(steps)}" if steps else "no messages"
    bad = [path.name for path in sorted(records.folder.glob("bad-*"))]
    besides = f" and {', '.join(bad)}" if bad else ""
    return (
        f"{what} cannot be run again: recorded are {there}{besides}, and in these are not all messages that the stage "
        "took from a snapshot up to it"
    )


def _run(
    job: Job, path: ReplayPath, wanted: ReplayTarget, run: str, reason: Reason | None, decisions: SkipLog
) -> Replayed:
    executor = job.executor([wanted.stage])
    carry_out = executor.within([Skipping(executor, decisions)] if leaves_out(job) else [])
    if path.state is not None:
        executor.stages[wanted.stage].restore(path.state)
    before = sum(not wanted.is_of(instruction) for instruction in path.instructions)
    outcomes: list[ReplayOutcome] = []
    for instruction in path.instructions:
        number = number_of(job, instruction.step, instruction.action)
        taken = [path.messages[Direction.TAKEN, queue, number] for queue in taken_queues(instruction)]
        received = [each.load().payload for each in taken]
        if not wanted.is_of(instruction):
            with _output_off():
                carry_out(instruction, received)
            continue
        try:
            result = carry_out(instruction, received)
        except ComputeFailed as error:
            return Replayed(run, path.start, before, outcomes, reason, error)
        outcomes.append(_outcome(instruction, number, result, run, path.messages))
    return Replayed(run, path.start, before, outcomes, reason)


def _outcome(
    instruction: Instruction, number: int, result: Tree, run: str, messages: Mapping[Place, RecordedMessage]
) -> ReplayOutcome:
    queue, action = instruction.action.outbound, str(instruction.action)
    if not queue:
        weights = instruction.action.kind is Kind.WEIGHT
        why = "gradients of weights stay in their stage" if weights else "no stage is before it"
        return ReplayOutcome(action, f"nothing: {why}", None)
    entry = messages.get((Direction.GIVEN, queue, number))
    bits = fingerprint(read_header(encode(Message(run, queue, number, 0, result))[0]))
    value = f" {result.item():.9g}" if isinstance(result, torch.Tensor) and result.numel() == 1 else ""
    same = None if entry is None else bits == fingerprint(entry.header)
    return ReplayOutcome(action, f"{describe(result)}{value}", same)


@contextlib.contextmanager
def _output_off() -> Iterator[None]:
    """Return a context that drops what the user's code prints, and in which `breakpoint()` does nothing."""
    before = sys.breakpointhook
    sys.breakpointhook = lambda *words, **options: None
    try:
        with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere):
            yield
    finally:
        sys.breakpointhook = before
