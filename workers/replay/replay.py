"""Runs one microbatch of one stage again, alone and in this process, and compares its bits with the recorded ones.

snapshot of step 100  ->  everything the stage did from there on, with output off  ->  2F5 and 2B5 of step 118
a bad microbatch, recorded with the state of its stage  --------------------------->
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
from stageline.pipeline.errors import ExitCode, StagelineError
from stageline.pipeline.plan import Plan, from_mapping
from stageline.pipeline.schedule import Action, Kind
from stageline.pipeline.tree import Tree, describe
from stageline.workers.checkpoint.manifest import Origin
from stageline.workers.runtime.executor import ComputeFailed
from stageline.workers.runtime.job import Job, prepare
from stageline.workers.runtime.program import Instruction
from stageline.workers.runtime.skipping import SkipLog, skipping

from .capture import output_key
from .directory import ABOUT, About, NotRecorded, Place, Reason, RecordDirectory
from .directory import FOLDER as RECORDED
from .path import ReplayPath, ReplayTarget, find_path, place_of
from .record_file import Direction, RecordedMessage


class NoSuchMicrobatch(StagelineError):
    """The run has no such stage, step or microbatch."""

    exit_code = ExitCode.USAGE


@dataclass(frozen=True, slots=True)
class ReplayOutcome:
    """An action's result, described in `found`, and whether it has the recorded bits; None if none are recorded."""

    action: str
    found: str
    same: bool | None


@dataclass(frozen=True, slots=True)
class Replayed:
    """A microbatch that was run again, from the snapshot of step `start`, after `before` other actions of its stage.

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
        """Whether everything that can be compared is as it was in the run."""
        raised = self.reason.reason if self.reason is not None and self.reason.raised else None
        if self.error is not None or raised is not None:
            return str(self.error) == raised
        return all(outcome.same is not False for outcome in self.outcomes)


def replay(run: Path, wanted: ReplayTarget, plan: Plan | None = None) -> Replayed:
    """Runs a microbatch of the run in the folder `run` again. Actions before it print nothing and skip breakpoints.

    `plan` is the run's plan as it is read now; by default it is used as recorded. Sets torch's number of threads.
    Raises `NotRecorded`, `RecordDamaged`, `SnapshotDamaged`, `NoSuchMicrobatch`, `PlanRefused`, `ModelRefused`,
    `DataError` or `ForeignState`, and `ComputeFailed` on the way to the microbatch.
    """
    about = _about(run, wanted.stage)
    recorded = from_mapping(about.plan, file=about.file or None)
    if plan is not None and plan.digest() != recorded.digest():
        raise NotRecorded(f"run {about.run} was made under another plan than this one; name its folder, {run}, instead")
    job = prepare(plan or recorded)
    _require_existence(job, wanted)
    torch.set_num_threads(job.plan.workers[job.schedule.owner(wanted.stage)].threads)
    records = RecordDirectory(run, wanted.stage)
    path = find_path(job, records, wanted, Origin(about.run, job.plan.digest()))
    place = (wanted.stage, wanted.step, wanted.microbatch)
    decisions = SkipLog(run, again=place)
    reason = records.reason(wanted.step, wanted.microbatch) or _reason_of(decisions.reason(place), wanted)
    return _run(job, path, wanted, about.run, reason, decisions)


def _reason_of(skipped: str | None, wanted: ReplayTarget) -> Reason | None:
    action = Action(Kind.FORWARD, wanted.stage, wanted.microbatch)
    return None if skipped is None else Reason(action=str(action), raised=True, reason=skipped)


def _about(run: Path, stage: int) -> About:
    """The record's description: of this stage, or else of any other, since that names the stages there are."""
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


def _require_existence(job: Job, wanted: ReplayTarget) -> None:
    bounds = {"stage": job.route.stages, "step": job.steps, "microbatch": job.schedule.microbatches}
    for name, count in bounds.items():
        if not 0 <= getattr(wanted, name) < count:
            raise NoSuchMicrobatch(f"there is no {name} {getattr(wanted, name)}: the run has {name}s 0 to {count - 1}")


def _run(
    job: Job, path: ReplayPath, wanted: ReplayTarget, run: str, reason: Reason | None, decisions: SkipLog
) -> Replayed:
    executor = job.executor_of([wanted.stage])
    carrier = skipping(executor, job.plan, decisions, job.route.stages - 1)
    if path.state is not None:
        executor.stages[wanted.stage].restore(path.state)
    before = sum(not wanted.is_of(instruction) for instruction in path.instructions)
    outcomes: list[ReplayOutcome] = []
    for instruction in path.instructions:
        received = [
            path.messages[place_of(Direction.TAKEN, key, instruction)].load().payload for key in instruction.takes
        ]
        if not wanted.is_of(instruction):
            with _output_off():
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
    key, action = output_key(instruction.action), str(instruction.action)
    if key is None:
        return ReplayOutcome(action, "nothing: no stage is before it", None)
    entry = messages.get(place_of(Direction.GIVEN, key, instruction))
    place = run, key.flow, instruction.step, instruction.action.microbatch, key.stage, 0, 0
    bits = fingerprint(read_header(encode(Message(*place, result))[0]))
    return ReplayOutcome(action, _described(result), None if entry is None else bits == fingerprint(entry.header))


def _described(result: Tree) -> str:
    if isinstance(result, Tensor) and result.numel() == 1:
        return f"{describe(result)} {result.item():.9g}"
    return describe(result)


@contextlib.contextmanager
def _output_off() -> Iterator[None]:
    """Drops what the user's code prints, and makes `breakpoint()` do nothing."""
    before = sys.breakpointhook
    sys.breakpointhook = lambda *words, **options: None
    try:
        with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere):
            yield
    finally:
        sys.breakpointhook = before
