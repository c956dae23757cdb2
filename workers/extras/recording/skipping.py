"""Omission of bad microbatches from the training, where the plan says so.

The stage that finds a microbatch bad decides: in its forward, by an exception or, on the last stage, a loss that is not
a finite number. The others learn it from what travels in the place of activations and gradients, so all agree
(`workers/runtime/left_out.py`). The decision is on disk before it is sent, and a replacement of the worker repeats it:
an exception need not come twice. In a backward it is too late, since the stages after this one have counted the
microbatch; the run stops.
"""

import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import structlog

from stageline.pipeline.feature import Compute
from stageline.pipeline.program import Instruction
from stageline.pipeline.retry import Note, passing_fault, persist
from stageline.pipeline.schedule import Kind
from stageline.pipeline.stage.stage import Stage
from stageline.pipeline.tree import Tree
from stageline.workers.disk.atomic_file import write_file
from stageline.workers.runtime.executor import Executor
from stageline.workers.runtime.job import Job
from stageline.workers.runtime.left_out import is_left_out
from stageline.workers.runtime.losses import BadMicrobatch, ComputeFailed, Culprit
from stageline.workers.runtime.worker_feature import WorkerFeature, WorkerPlace

FOLDER = "skipped"
IN_A_ROW = 10  # as many microbatches are not bad: the model is

log = structlog.get_logger()

Place = tuple[int, int, int]  # stage, step, microbatch


class SkipLog:
    """The decisions of a run to leave microbatches out, a file for each: skipped/stage-1/118-5 says why.

    Its methods raise `OSError`.
    """

    def __init__(
        self,
        run: Path,
        again: Place | None = None,
        *,
        note: Note = lambda fault: None,
        wait: Callable[[float], object] = time.sleep,
    ) -> None:
        """Take the folder of the run; nothing is written yet.

        Args:
            run: Folder of the run.
            again: Microbatch that is to be run in spite of its decision, when the run is over and nothing more can be
                decided.
            note: Takes the reason why a decision cannot be written for now.
            wait: Waits so many seconds before another attempt.
        """
        self.folder = run / FOLDER
        self.again = again
        self._note = note
        self._wait = wait

    def decided(self, stage: int) -> set[Place]:
        """Return the microbatches that `stage` has left out so far."""
        names = (path.name.split("-") for path in (self.folder / f"stage-{stage}").glob("[0-9]*"))
        return {(stage, int(step), int(microbatch)) for step, microbatch in names} - {self.again}

    def reason(self, place: Place) -> str | None:
        """Return the reason why the stage has left the microbatch out; None if it has not."""
        try:
            return self._path(place).read_text().removesuffix("\n")
        except FileNotFoundError:
            return None

    def decide(self, place: Place, reason: str) -> None:
        """Write a decision, which survives a power failure once this returns.

        Raises `OSError`, and what `wait` raises.
        """
        path = self._path(place)
        write = partial(write_file, path, f"{reason}\n".encode())
        persist(write, f"write {path}", self._note, now=time.monotonic, wait=self._wait)

    def _path(self, place: Place) -> Path:
        stage, step, microbatch = place
        return self.folder / f"stage-{stage}" / f"{step}-{microbatch}"


class Skipping(WorkerFeature):
    """The feature that leaves bad microbatches out of an executor's computations."""

    name = "skipping"
    only_trains = True

    def __init__(self, executor: Executor, decisions: SkipLog) -> None:
        """Read the decisions that were made before.

        Args:
            executor: Computes the stages.
            decisions: The decisions; new ones are added.
        """
        self._executor = executor
        self._decisions = decisions
        self._in_a_row: Counter[int] = Counter()  # by stage
        self._decided = {place for stage in executor.stages for place in decisions.decided(stage)}

    def around(self, stage: Stage, kind: str, compute: Compute) -> Compute:
        """Return `compute` without bad microbatches, for forwards; others are unchanged."""

        def forward(instruction: Instruction, received: Sequence[Tree]) -> Tree:
            if _place(instruction) in self._decided:
                return self._leave_out(instruction)
            buffers = stage.buffers()
            try:
                result = compute(instruction, received)
                self._demand_finite_loss(instruction)
            except ComputeFailed as error:
                if passing_fault(error):  # not the microbatch's
                    raise
                self._decide(instruction, error)
                stage.set_buffers(buffers)
                return self._leave_out(instruction)
            if not is_left_out(result):  # of another stage's decision
                self._in_a_row[stage.index] = 0
            return result

        return forward if kind == Kind.FORWARD else compute

    def _demand_finite_loss(self, instruction: Instruction) -> None:
        loss = self._executor.losses.newest if instruction.action.stage == self._executor.last else None
        if loss is not None and not math.isfinite(loss.item()):
            microbatch, step = instruction.action.microbatch, instruction.step
            culprit = Culprit(step, instruction.action, loss)
            raise BadMicrobatch(f"the loss of microbatch {microbatch} of step {step} is {loss.item()}", culprit)

    def _decide(self, instruction: Instruction, error: ComputeFailed) -> None:
        """Decide to leave the microbatch out.

        Raises `error` if the fault cannot be the microbatch's, or nothing can be decided any more.
        """
        if self._decisions.again is not None:
            raise error
        place = _place(instruction)
        self._in_a_row[place[0]] += 1
        if self._in_a_row[place[0]] == IN_A_ROW:
            raise ComputeFailed(f"{error.args[0]}. {IN_A_ROW} microbatches in a row are bad", error.culprit) from error
        try:
            self._decisions.decide(place, str(error))
        except OSError as problem:
            raise ComputeFailed(f"{error.args[0]}. It could not be left out: {problem}", error.culprit) from error
        log.warning("a bad microbatch is left out", step=place[1], microbatch=place[2], reason=str(error))

    def _leave_out(self, instruction: Instruction) -> Tree:
        if instruction.action.stage == self._executor.last:
            self._executor.losses.leave_out(instruction.action.microbatch)
        return self._executor.left_out.begin(instruction)


def skipping(place: WorkerPlace) -> Skipping | None:
    """Return the feature that leaves bad microbatches out; None if the plan does not say so."""
    if not leaves_out(place.job):
        return None
    decisions = SkipLog(place.folder, note=place.progress.noting("skip log"), wait=place.serve)
    return Skipping(place.executor, decisions)


def leaves_out(job: Job) -> bool:
    """Return True if bad microbatches are left out of the run."""
    return job.plan.recovery.on_bad_microbatch == "skip" and not job.schedule.shares


def _place(instruction: Instruction) -> Place:
    return instruction.action.stage, instruction.step, instruction.action.microbatch
