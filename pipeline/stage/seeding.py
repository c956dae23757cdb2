"""Random numbers that are the same wherever the model is cut: every layer has a seed of its own for each microbatch."""

from hashlib import sha256

import torch


def layer_seed(seed: int, step: int, microbatch: int, layer: int) -> int:
    """What the random generators are seeded with before `layer`, counted in the whole model."""
    return int.from_bytes(sha256(f"{seed}/{step}/{microbatch}/{layer}".encode()).digest()[:8], "little")


def generators(device: torch.device) -> list[torch.Generator]:
    """Those that layers on `device` draw from: torch's default ones."""
    if device.type != "cuda":
        return [torch.default_generator]
    torch.cuda.init()  # type: ignore[no-untyped-call]  # fills default_generators
    index = torch.cuda.current_device() if device.index is None else device.index
    return [torch.default_generator, torch.cuda.default_generators[index]]
