"""Leaves bad microbatches out of the training, where the plan says so.

    stage      0         1 (bad)      2 (last)
    forward    4  ──────> 4 ─ skip ──>  skip        no layer runs; the loss is not counted
    backward   None <──── None <─────── None        no gradient: nothing is added up

The stage that finds a microbatch bad decides: in its forward, by an exception or, on the last stage, a loss that is not
a finite number. The others learn it from what travels in the place of activations and gradients, so all agree. The
decision is on disk before it is sent, and a replacement of the worker repeats it: an exception need not come twice. In
a backward it is too late, since the stages after this one have counted the microbatch; the run stops.
"""

import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import structlog

from stageline.pipeline.retry import Note, passing_fault, persist
from stageline.pipeline.schedule import Kind
from stageline.pipeline.tree import Tree
from stageline.workers.disk.atomic_file import write_file
from stageline.workers.runtime.program.instruction import Instruction

from .executor import Executor
from .losses import BadMicrobatch, ComputeFailed, Culprit

FOLDER = "skipped"
MARK: Tree = {"stageline": "skip"}  # travels in an activation's place
IN_A_ROW = 10  # as many microbatches are not bad: the model is

log = structlog.get_logger()

Place = tuple[int, int, int]  # stage, step, microbatch


class SkipLog:
    """The decisions of a run, a file for each: skipped/stage-1/118-5 says why. Raises `OSError`.

    `again`: a microbatch that is to be run in spite of what was decided, when the run is over and nothing more can be
    decided.
    """

    def __init__(self, run: Path, again: Place | None = None) -> None:
        self.folder = run / FOLDER
        self.again = again
        self.note: Note = lambda fault: None  # takes why a decision cannot be written for now
        self.wait: Callable[[float], object] = time.sleep  # seconds, before it is written again

    def decided(self, stage: int) -> set[Place]:
        """What was decided so far."""
        names = (path.name.split("-") for path in (self.folder / f"stage-{stage}").glob("[0-9]*"))
        return {(stage, int(step), int(microbatch)) for step, microbatch in names} - {self.again}

    def reason(self, place: Place) -> str | None:
        """Why a microbatch was left out, None if it was not, or not by this stage."""
        try:
            return self._path(place).read_text().removesuffix("\n")
        except FileNotFoundError:
            return None

    def decide(self, place: Place, reason: str) -> None:
        """When this returns, the decision survives a power failure. Raises `OSError`, and what `wait` raises."""
        path = self._path(place)
        write = partial(write_file, path, f"{reason}\n".encode())
        persist(write, f"write {path}", self.note, now=time.monotonic, wait=self.wait)

    def _path(self, place: Place) -> Path:
        stage, step, microbatch = place
        return self.folder / f"stage-{stage}" / f"{step}-{microbatch}"


class SkippingExecutor(Executor):
    """Carries out as any executor does, but for bad microbatches."""

    def __init__(self, *parts: Any, decisions: SkipLog, **options: Any) -> None:
        super().__init__(*parts, **options)
        self.decisions = decisions
        self._left_out: set[Place] = set()  # between its forward and its backward
        self._in_a_row: Counter[int] = Counter()  # by stage
        self._decided = {place for stage in self.stages for place in self.decisions.decided(stage)}

    def carry_out(self, instruction: Instruction, received: Sequence[Tree]) -> Tree:
        match instruction.action.kind:
            case Kind.FORWARD if not instruction.evaluates:
                return self._forward_or_skip(instruction, received)
            case Kind.BACKWARD | Kind.INPUT | Kind.WEIGHT if _place(instruction) in self._left_out:
                return self._skip_backward(instruction)
            case _:
                return super().carry_out(instruction, received)

    def _forward_or_skip(self, instruction: Instruction, received: Sequence[Tree]) -> Tree:
        if MARK in received or _place(instruction) in self._decided:
            return self._leave_out(instruction)
        stage = self.stages[instruction.action.stage]
        buffers = stage.buffers()
        try:
            result = super().carry_out(instruction, received)
            self._demand_finite_loss(instruction)
        except ComputeFailed as error:
            if passing_fault(error):  # not the microbatch's
                raise
            self._decide(instruction, error)
            stage.set_buffers(buffers)
            return self._leave_out(instruction)
        self._in_a_row[stage.index] = 0
        return result

    def _demand_finite_loss(self, instruction: Instruction) -> None:
        loss = self.losses.newest if instruction.action.stage == self.last else None
        if loss is not None and not math.isfinite(loss.item()):
            microbatch, step = instruction.action.microbatch, instruction.step
            culprit = Culprit(step, instruction.action, loss)
            raise BadMicrobatch(f"the loss of microbatch {microbatch} of step {step} is {loss.item()}", culprit)

    def _decide(self, instruction: Instruction, error: ComputeFailed) -> None:
        """Raises `error` if the fault cannot be the microbatch's, or nothing can be decided any more."""
        if self.decisions.again is not None:
            raise error
        place = _place(instruction)
        self._in_a_row[place[0]] += 1
        if self._in_a_row[place[0]] == IN_A_ROW:
            raise ComputeFailed(f"{error}. {IN_A_ROW} microbatches in a row are bad", error.culprit) from error
        try:
            self.decisions.decide(place, str(error))
        except OSError as problem:
            raise ComputeFailed(f"{error}. It could not be left out: {problem}", error.culprit) from error
        log.warning("a bad microbatch is left out", step=place[1], microbatch=place[2], reason=str(error))

    def _leave_out(self, instruction: Instruction) -> Tree:
        stage = instruction.action.stage
        self._left_out.add(_place(instruction))
        if stage != self.last:
            return MARK
        self.losses.leave_out(instruction.action.microbatch)
        return None

    def _skip_backward(self, instruction: Instruction) -> Tree:
        """Drops what the forward may have stashed. Always the same None, whether or not a forward ran."""
        place = _place(instruction)
        if instruction.action.kind is not Kind.INPUT:  # its second half is to come
            self._left_out.remove(place)
        self.stages[place[0]].backward(None, step=place[1], microbatch=place[2])
        return None


def _place(instruction: Instruction) -> Place:
    return instruction.action.stage, instruction.step, instruction.action.microbatch
