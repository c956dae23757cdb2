"""A stage whose layers are split over a group of processes: each makes the same calls of its own, in the same order.

    leader   LeadingStage   has queues, reports and snapshots; before each call it hands it to the members
    members  SplitStage     make the calls that they are handed (`make_call`)

Inputs, outputs, gradients between stages and snapshots are whole, as those of any stage; weights, their gradients and
the optimizer's state are split.
"""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

from stageline.pipeline.errors import StageError
from stageline.pipeline.features.halves import Root
from stageline.pipeline.stage.layers.memory import whole
from stageline.pipeline.stage.layers.stash import Version
from stageline.pipeline.stage.stage import NOT_GIVEN, Stage, _NotGiven
from stageline.pipeline.stage.stage_state import StageState
from stageline.pipeline.tree import Tree, map_tensors


class Members(Protocol):
    """The other processes of a group, as its leader sees them."""

    def call(self, name: str, *arguments: "Tree | StageState") -> AbstractContextManager[None]:
        """Hands them a call that the leader makes within the context. Raises `GroupLost`, there too."""


class SplitStage(Stage):
    """One process's part of a stage. What it returns is whole: where a layer leaves it split, it is gathered."""

    def state_dict(self, *, ema: bool = False) -> dict[str, torch.Tensor]:
        """Gathered. Raises `StageError` for averages: a split stage has none."""
        return {name: whole(tensor) for name, tensor in super().state_dict(ema=ema).items()}

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        raise StageError(f"stage {self.index} is computed by a group: its weights are set by a checkpoint only")

    def backward_input(
        self,
        gradient: "Tree | _NotGiven" = NOT_GIVEN,
        *,
        step: int | None = None,
        microbatch: int | None = None,
        owned: bool = False,
    ) -> Tree:
        raise StageError(f"stage {self.index} is computed by a group, which does not halve a backward: use backward")

    def _run(self, x: Tree, key: tuple[int, int], version: Version, *, taps: bool = True) -> Tree:
        return map_tensors(whole, super()._run(x, key, version, taps=taps))


class LeadingStage(SplitStage):
    """The stage of the group's leader, which has the queues and reports: has `members` make each of its calls, too."""

    def __init__(self, *args: Any, members: Members, **options: Any) -> None:
        super().__init__(*args, **options)
        self._members = members

    def forward(
        self,
        x: Tree,
        target: Tree = None,
        *,
        step: int = 0,
        microbatch: int | None = None,
        share: float = 1.0,
        owned: bool = False,
    ) -> Tree:
        # With gradients on already, the stage does not call this once more to have them.
        with torch.enable_grad(), self._members.call("forward", x, target, step, microbatch, share):
            return super().forward(x, target, step=step, microbatch=microbatch, share=share, owned=owned)

    def backward(
        self,
        gradient: "Tree | _NotGiven" = NOT_GIVEN,
        *,
        step: int | None = None,
        microbatch: int | None = None,
        owned: bool = False,
        roots: Sequence[Root] = (),
    ) -> Tree:
        given = () if isinstance(gradient, _NotGiven) else (gradient,)
        with self._members.call("backward", step, microbatch, *given):
            return super().backward(gradient, step=step, microbatch=microbatch, owned=owned, roots=roots)

    def norms(self, later: Tree = None) -> Tree:
        with self._members.call("norms"):
            return super().norms(later)

    def clip(self, total: Tree = None) -> Tree:
        found = super().clip(total)
        with self._members.call("clip", found):
            return found

    def update(self, step: int | None = None) -> None:
        with self._members.call("update", step):
            super().update(step)

    def evaluate(self, x: Tree, *, step: int = 0, microbatch: int = 0, owned: bool = False, ema: bool = False) -> Tree:
        with self._members.call("evaluate", x, step, microbatch):
            return super().evaluate(x, step=step, microbatch=microbatch, owned=owned, ema=ema)

    def state_dict(self, *, ema: bool = False) -> dict[str, torch.Tensor]:
        with self._members.call("state_dict"):
            return super().state_dict(ema=ema)

    def snapshot(self) -> StageState:
        with self._members.call("snapshot"):
            return super().snapshot()

    def state(self) -> StageState:
        with self._members.call("state"):
            return super().state()

    def restore(self, state: StageState) -> None:
        with self._members.call("restore", state):
            super().restore(state)


def make_call(stage: Stage, name: str, arguments: tuple[Any, ...]) -> None:
    """Makes a call that the leader has handed to a member. What it returns, the leader has, too."""
    match name, arguments:
        case "forward", (x, target, step, microbatch, share):
            stage.forward(x, target, step=step, microbatch=microbatch, share=share, owned=True)
        case "backward", (step, microbatch, *given):
            stage.backward(*given, step=step, microbatch=microbatch, owned=True)
        case "update", (step,):
            stage.update(step)
        case "evaluate", (x, step, microbatch):
            stage.evaluate(x, step=step, microbatch=microbatch, owned=True)
        case "clip", (total,):
            stage.clip(total)
        case "restore", (state,):
            stage.restore(state)
        case "norms" | "state_dict" | "snapshot" | "state", ():
            getattr(stage, name)()
        case _:
            raise StageError(f"there is no call {name} with {len(arguments)} arguments")
