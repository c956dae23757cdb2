"""Seeds each layer for each microbatch, so that random numbers do not depend on where the model is cut."""

from hashlib import sha256

import torch


def layer_seed(seed: int, step: int, microbatch: int, layer: int) -> int:
    """The seed before `layer`, numbered in the unsplit model."""
    return int.from_bytes(sha256(f"{seed}/{step}/{microbatch}/{layer}".encode()).digest()[:8], "little")


def generators(device: torch.device) -> list[torch.Generator]:
    """The generators that layers on `device` draw from: torch's default ones of the CPU and of the device."""
    if device.type != "cuda":
        return [torch.default_generator]
    torch.cuda.init()  # type: ignore[no-untyped-call]  # fills default_generators
    index = torch.cuda.current_device() if device.index is None else device.index
    return [torch.default_generator, torch.cuda.default_generators[index]]
