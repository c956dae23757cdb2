"""Run of a line that begins with its first batch, while it waits for that: it answers for the model alone."""

from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import cast

import torch
from torch import Tensor

from stageline.pipeline.errors import ModelRefused
from stageline.pipeline.plan import Plan
from stageline.pipeline.tree import Tree
from stageline.workers.checkpoint.saved import NOTHING_TRAINED, NotSaved
from stageline.workers.runs import folder as runs
from stageline.workers.runtime.calls import Call, CallKind

from .arguments import LineCall
from .calls.calls import Replies
from .calls.page import Timetable, planned
from .inline_run import InlineRun

_BEGINS = "begins with the first batch"


class WaitingRun:
    """Run that begins with the first batch. Until then it answers for the model alone, and nothing is started.

    Attributes:
        id: Id that the run will have; "" inline.
        fits: Numbers of the fits that were begun.
        size: Number of workers.
        folder: Folder that the run will have; None inline.
        position: 0, since no step was called.
        cannot_save: Why the run will save no checkpoints; "" if it will.
    """

    position = 0

    def __init__(self, call: LineCall, model: torch.nn.Module, plan: Plan) -> None:
        """Take the model.

        Args:
            call: Arguments of the line.
            model: Model that was made, with its weights unless files have them.
            plan: Plan of the run, with the number of microbatches that it has for batches of many rows.
        """
        inline = call.workers == "inline"
        self._call, self._model, self._plan = call, model, plan
        self.id = "" if inline else runs.new_id(plan)
        self.fits: list[int] = []
        self.size = len(plan.placement)
        self.folder = None if inline else runs.folder(plan, self.id)
        self.cannot_save = InlineRun.cannot_save if inline else ""

    def submit(self, call: Call) -> "Future[Replies]":
        """Return the model's weights, or set them; other calls come with a batch.

        Raises:
            ModelRefused: The weights are in files.
        """
        if call.kind is CallKind.LOAD:
            self._demand_weights("load_state_dict")
            self._model.load_state_dict(dict(call.state or {}))
        done: Future[Replies] = Future()
        done.set_result({0: cast("Tree", self.weights()) if call.kind is CallKind.STATE else None})
        return done

    def panels(self) -> str:
        """Return "": there is no broker, and there are no records."""
        return ""

    def weights(self, *, ema: bool = False) -> dict[str, Tensor]:
        """Return copies of the model's weights by name, on the CPU; their averages are equal before the first step."""
        self._demand_weights("state_dict")
        state = self._model.state_dict()
        return {name: each.detach().cpu().clone() for name, each in state.items() if isinstance(each, Tensor)}

    def of_fit(self, number: int) -> None:
        """Note that fit `number` begins, for the record of the run; there is no batch to compare."""
        self.fits.append(number)

    def save(self, folder: Path, call: Callable[[str], Replies]) -> None:
        """Raise `NotSaved`: no step was trained yet."""
        raise NotSaved(self.cannot_save or NOTHING_TRAINED)

    def waits_for(self) -> str:
        """Return "": the line waits for its script."""
        return ""

    def news(self) -> list[str]:
        """Return no news."""
        return []

    def workers(self) -> list[str]:
        """Return one line for each worker, with its stages."""
        placement = enumerate(self._plan.placement)
        return [f"worker {worker}, stage {', '.join(map(str, owned))}: {_BEGINS}" for worker, owned in placement]

    def timetable(self) -> Timetable:
        """Return the timetable of the plan."""
        return planned(self._plan.make_schedule())

    def close(self) -> None:
        """Do nothing: no process was started, and no folder was made."""

    def abort(self, reason: str, *, knows_failure: bool = False, interrupted: bool = False) -> None:
        """Do nothing, as `close`."""

    def discard(self) -> None:
        """Do nothing, as `close`."""

    def _demand_weights(self, method: str) -> None:
        if self._call.loads_weights:
            raise ModelRefused(
                f"{method} before the first batch: workers read the weights from files when the run begins, which it "
                "does with that batch. Call it after the first step, evaluate or predict"
            )
