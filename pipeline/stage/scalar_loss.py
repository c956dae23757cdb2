"""The loss of a batch or a microbatch: one number, the mean over its rows."""

from collections.abc import Callable
from typing import Any

import torch

from stageline.pipeline.errors import LossNotScalar, StageError
from stageline.pipeline.tree import Tree, describe

Loss = Callable[[Any, Any], torch.Tensor]


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
