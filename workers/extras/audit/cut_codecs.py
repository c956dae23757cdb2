"""The codecs of the queues at a cut, and what they make of the tensors that cross it.

    activation --> forward codec --> what the layers above are given
    what the layers below are given <-- backward codec <-- its gradient

A cut that the plan has, too, has the codecs of its two queues; another has those that the plan gives all queues of a
direction.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from stageline.broker.codec.codecs import Codec
from stageline.broker.codec.tensors import delivered
from stageline.pipeline.model.cut import build_segments
from stageline.pipeline.plan import Plan
from stageline.pipeline.tree import Tree, map_tensors


@dataclass(frozen=True, slots=True)
class CutCodecs:
    """Of activations, and of the gradients that come back: as the plan calls them."""

    forward: str = "lossless"
    backward: str = "lossless"

    @property
    def lossless(self) -> bool:
        return self.forward == self.backward == "lossless"

    def passed(self, tree: Tree) -> Tree:
        """Activations as they arrive. Their gradients come back as they would."""
        if self.lossless:
            return tree
        return map_tensors(lambda each: _Passed.apply(each, self) if each.is_floating_point() else each, tree)  # type: ignore[no-untyped-call]


def codecs_at(plan: Plan, cuts: Iterable[int]) -> dict[int, CutCodecs]:
    """Of each of the `cuts`, numbers of the layers above them. Makes the model where a queue has a codec of its own.

    Raises `ModelRefused` or `PlanRefused` if that cannot be made or cut.
    """
    given = plan.queues.codec
    named = isinstance(given, dict) and any("-" in name for name in given)
    stages = {part.first_layer: part.index for part in build_segments(plan)} if named else {}
    return {cut: _codecs(plan, stages.get(cut)) for cut in cuts}


def _codecs(plan: Plan, above: int | None) -> CutCodecs:
    """Of the cut below the stage `above`; None: of one that the plan does not have."""
    below = None if above is None else above - 1
    return CutCodecs(plan.queues.codec_of("forward", above), plan.queues.codec_of("backward", below))


class _Passed(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, tensor: Tensor, codecs: CutCodecs) -> Tensor:
        context.codec = codecs.backward
        return _delivered(tensor, codecs.forward)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _delivered(gradient, context.codec), None


def _delivered(tensor: Tensor, codec: str) -> Tensor:
    """Never `tensor` itself: a layer may write to what it is given."""
    found: Tensor = delivered(tensor.detach().clone(), Codec[codec.upper()])  # type: ignore[assignment]  # of a tensor
    return found
