"""Checks what a loss function returns."""

from typing import Any

from torch import Tensor

from stageline.pipeline.errors import LossNotScalar
from stageline.pipeline.tree import describe


def scalar(loss: Any) -> Tensor:
    """`loss`, if it is a 0-dimensional tensor. Raises `LossNotScalar` otherwise."""
    if not isinstance(loss, Tensor) or loss.dim() != 0:
        found = describe(loss) if isinstance(loss, Tensor) else repr(loss)
        raise LossNotScalar(
            f"the loss must be one number (a 0-dimensional tensor, the mean over rows); "
            f"it returned {found}. Use reduction='mean', or take its mean()."
        )
    return loss
