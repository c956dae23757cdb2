"""What a probe is given of a layer: one row of numbers for each sample, however many dimensions the layer has.

[rows]                    [rows, 1]
[rows, features]          as it is
[rows, places, features]  the mean over the places; or the last of them; or all side by side, "flatten"
more dimensions           all side by side; or the mean over all but rows and the last; or the last of dimension 1
"""

from enum import StrEnum

import torch
from torch import Tensor

from .reading import TappedMicrobatch, TapsUnusable, tensors_of


class Pool(StrEnum):
    """What becomes of the dimensions between rows and the last."""

    MEAN = "mean"
    FLATTEN = "flatten"
    LAST = "last"


def features_of(layer: str, part: TappedMicrobatch, pool: Pool | None) -> Tensor:
    """float64 [rows, features] of the layer's tensors of numbers with a fraction, side by side. Raises `TapsUnusable`
    if there is none, or a number is not finite."""
    rows = next((each.shape[0] for each in tensors_of(part.activations) if each.dim()), 0)
    usable = [each for each in tensors_of(part.activations) if each.is_floating_point() and each.shape[:1] == (rows,)]
    if not usable:
        raise TapsUnusable(
            f"layer {layer} returned no tensor of numbers with a fraction whose dimension 0 counts rows: leave it out "
            "with --layers"
        )
    found = torch.cat([pooled(each.double(), pool) for each in usable], dim=1)
    if not found.isfinite().all():
        raise TapsUnusable(
            f"layer {layer} returned numbers that are not finite for {part.place}: no probe can be trained on them; "
            "leave it out with --layers"
        )
    return found


def pooled(tensor: Tensor, pool: Pool | None) -> Tensor:
    """[rows, features] of [rows, ...]; None: by its dimensions."""
    if tensor.dim() <= 2:
        return tensor if tensor.dim() == 2 else tensor[:, None]
    match pool or (Pool.MEAN if tensor.dim() == 3 else Pool.FLATTEN):
        case Pool.MEAN:
            return tensor.mean(tuple(range(1, tensor.dim() - 1)))
        case Pool.LAST:
            return tensor[:, -1].flatten(1)
        case Pool.FLATTEN:
            return tensor.flatten(1)
