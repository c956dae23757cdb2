"""Tensors of which each process of a group has a part (torch's `DTensor`), made whole and split again.

Nothing here imports torch.distributed: a stage that one process computes has no such tensor, and need not load it.
"""

import torch


def is_split(tensor: torch.Tensor) -> bool:
    return hasattr(tensor, "full_tensor")


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself, or if it is split, all of it: then every process of its group has to call this at once."""
    gather = getattr(tensor, "full_tensor", None)
    return tensor if gather is None else gather()


def own_part(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself, or if it is split, the part that is in this process."""
    part = getattr(tensor, "to_local", None)
    return tensor if part is None else part()


def split_like(model: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """`tensor`, which every process of the group has whole, split as `model` is; itself if `model` is not split, or has
    another shape. The processes do not communicate."""
    mesh = getattr(model, "device_mesh", None)
    if mesh is None or model.shape != tensor.shape:
        return tensor
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(tensor.to(model.device), mesh, model.placements, src_data_rank=None)  # type: ignore[attr-defined]
