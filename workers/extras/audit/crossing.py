"""Changes to what crosses a cut: the codecs of its queues, and defences, which are layers beside it.

    activation --> forward codec --> what the layers above are given
    what the layers below are given <-- backward codec <-- its gradient

A cut that the plan has, too, has the codecs of its two queues; another has those that the plan gives all queues of a
direction.

Defences have a price in accuracy. The first two stand last before the cut, the third first after it, since each
stands with the one who sends:

    AddNoise            forward    x + share * std(x) * N(0, 1), in training and evaluation
    ClipRows            forward    rows with a larger norm are scaled down to it
    EqualNormGradients  backward   each row's gradient is scaled to the mean norm: norms tell no labels, directions do

A stage's layers are seeded one by one, so noise is the same wherever the model is cut, and in a run that is repeated.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from stageline.broker.codec.codecs import Codec
from stageline.broker.codec.tensors import delivered
from stageline.pipeline.model.cut import build_segments
from stageline.pipeline.plan import Plan
from stageline.pipeline.tree import Tree, map_tensors


@dataclass(frozen=True, slots=True)
class CutCodecs:
    """Codecs of activations and of the gradients that come back, by the plan's names."""

    forward: str = "lossless"
    backward: str = "lossless"

    @property
    def lossless(self) -> bool:
        """True if neither direction loses anything."""
        return self.forward == self.backward == "lossless"

    def passed(self, tree: Tree) -> Tree:
        """Return `tree` as it arrives after the forward codec. In backward, gradients pass the backward codec."""
        if self.lossless:
            return tree
        return map_tensors(lambda each: _Passed.apply(each, self) if each.is_floating_point() else each, tree)  # type: ignore[no-untyped-call]


def codecs_at(plan: Plan, cuts: Iterable[int]) -> dict[int, CutCodecs]:
    """Return the codecs at each of `cuts`. The model is made if some queue has a codec of its own.

    Args:
        plan: Plan with the codecs of its queues.
        cuts: Numbers of the layers above the cuts.

    Raises:
        ModelRefused: The model cannot be made.
        PlanRefused: The model cannot be cut as the plan says.
    """
    given = plan.queues.codec
    named = isinstance(given, dict) and any("-" in name for name in given)
    stages = {part.first_layer: part.index for part in build_segments(plan)} if named else {}
    return {cut: _codecs(plan, stages.get(cut)) for cut in cuts}


def _codecs(plan: Plan, above: int | None) -> CutCodecs:
    """Return the codecs at the cut below the stage `above`; None stands for a cut that the plan does not have."""
    below = None if above is None else above - 1
    return CutCodecs(plan.queues.codec_of("forward", above), plan.queues.codec_of("backward", below))


class _Passed(torch.autograd.Function):
    """Passage of a tensor through the codecs of a cut: values by the forward codec, gradients by the backward codec."""

    @staticmethod
    def forward(context: Any, tensor: Tensor, codecs: CutCodecs) -> Tensor:
        context.codec = codecs.backward
        return _delivered(tensor, codecs.forward)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _delivered(gradient, context.codec), None


def _delivered(tensor: Tensor, codec: str) -> Tensor:
    """Return the tensor as it arrives, never `tensor` itself: a layer may write to its input."""
    found: Tensor = delivered(tensor.detach().clone(), Codec[codec.upper()])  # type: ignore[assignment]  # of a tensor
    return found


class AddNoise(nn.Module):
    """Layer that adds normal noise with the deviation of its input's numbers, times `share`."""

    def __init__(self, share: float) -> None:
        """Create the layer. Raises `ValueError` if `share` is not above 0."""
        super().__init__()
        self.share = _positive("share", share)

    def forward(self, x: Tensor) -> Tensor:
        """Return `x` with noise. `x` is floating, [rows, ...]; shape and dtype stay the same."""
        return x + self.share * x.detach().std(correction=0) * torch.randn_like(x)

    def extra_repr(self) -> str:
        """Return the share, for `repr`."""
        return f"{self.share:g}"


class ClipRows(nn.Module):
    """Layer that scales rows whose Euclidean norm is above `norm` down to it."""

    def __init__(self, norm: float) -> None:
        """Create the layer. Raises `ValueError` if `norm` is not above 0."""
        super().__init__()
        self.norm = _positive("norm", norm)

    def forward(self, x: Tensor) -> Tensor:
        """Return `x` with clipped rows. `x` is floating, [rows, ...]; shape and dtype stay the same."""
        norms = x.detach().flatten(1).norm(dim=1).reshape(-1, *[1] * (x.dim() - 1))
        clipped: Tensor = x * (self.norm / norms.clamp(min=self.norm))
        return clipped

    def extra_repr(self) -> str:
        """Return the norm, for `repr`."""
        return f"{self.norm:g}"


class EqualNormGradients(nn.Module):
    """Identity whose backward scales each row's gradient to the mean norm of the microbatch's rows.

    A gradient of zeros stays zeros.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Return the values of `x`, which is floating, [rows, ...]."""
        found: Tensor = _EqualNorm.apply(x)  # type: ignore[no-untyped-call]
        return found


class _EqualNorm(torch.autograd.Function):
    """Function of `EqualNormGradients`: an identity whose backward equalizes the norms of the rows' gradients."""

    @staticmethod
    def forward(context: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Tensor:
        norms = gradient.flatten(1).norm(dim=1)
        scale = torch.where(norms > 0, norms.mean() / norms, torch.zeros_like(norms))
        return gradient * scale.reshape(-1, *[1] * (gradient.dim() - 1))


def _positive(name: str, value: float) -> float:
    if not value > 0:
        raise ValueError(f"{name} = {value:g}: expected a number above 0")
    return value
