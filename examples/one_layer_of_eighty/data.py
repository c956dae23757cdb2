"""Points near the three arms of a spiral, which lies in a plane of 16 dimensions: no linear function separates them."""

import torch

from stageline import Rows


def batches(batch_size: int, seed: int) -> Rows:
    """Points float32 [rows, 16] and their arms int64 [rows]. The seed orders the rows, no more."""
    generator = torch.Generator().manual_seed(0)
    arms = torch.arange(1500) % 3
    distance = 0.1 + 0.9 * torch.rand(1500, generator=generator)
    angle = 4 * distance + 2 * torch.pi / 3 * arms + 0.1 * torch.randn(1500, generator=generator)
    plane = torch.stack([distance * angle.cos(), distance * angle.sin()], dim=1)
    points = plane @ torch.randn(2, 16, generator=generator) + 0.1 * torch.randn(1500, 16, generator=generator)
    return Rows(points[:1000], arms[:1000], batch_size, seed, held_out=(points[1000:], arms[1000:]))
