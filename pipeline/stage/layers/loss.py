"""The loss of a batch or a microbatch: one number, the mean over its rows.

With autocast, operations that gain by it take bfloat16:

    forward    in the context: layers, and the loss
    backward   outside of it, as torch recommends: each operation in the dtype that its forward had

The cache of weights that were cast is off. It would add up a weight's gradients in bfloat16 as far as its uses are in
one stage, so the bits would follow from the cut.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, Literal

import torch

from stageline.pipeline.errors import LossNotScalar, StageError
from stageline.pipeline.tree import Tree, describe

Loss = Callable[[Any, Any], torch.Tensor]
Autocast = Literal["bf16"]
Precision = Callable[[], AbstractContextManager[object]]  # a context for one forward


def scalar_loss(function: Loss, output: Tree, target: Tree) -> torch.Tensor:
    """What `function` returns, 0-dimensional. Raises `LossNotScalar`, and whatever `function` raises."""
    loss = function(output, target)
    if isinstance(loss, torch.Tensor) and loss.dim() == 0:
        return loss
    raise LossNotScalar(
        f"the loss must be one number (a 0-dimensional tensor, the mean over rows); "
        f"it returned {describe(loss) if isinstance(loss, torch.Tensor) else repr(loss)}. "
        f"Use reduction='mean', or take its mean()."
    )


def demand_gradient(loss: torch.Tensor) -> None:
    """Raises `StageError` where `loss.backward()` of the unsplit model would raise, too."""
    if not loss.requires_grad:
        raise StageError(
            "the loss has no gradient, so nothing would be trained: between the weights and the loss there is a "
            "detach(), a no_grad(), or an operation without a derivative such as argmax(); or the loss function "
            "returned a constant. For a microbatch that is not to count, return (output * 0).sum()"
        )


def precision_of(autocast: Autocast | None, device: torch.device) -> Precision:
    """The context of each forward, on `device`; one that does nothing without `autocast`."""
    if autocast is None:
        return nullcontext
    return partial(torch.autocast, device.type, dtype=torch.bfloat16, cache_enabled=False)
