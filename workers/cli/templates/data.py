"""Points on the three arms of a spiral, made by a formula: put your own data here."""

import torch

from stageline import Rows


def batches(batch_size: int, seed: int) -> Rows:
    """Return points float32 [rows, 2] and their arms int64 [rows]. The seed only orders the rows."""
    generator = torch.Generator().manual_seed(0)
    arms = torch.arange(1500) % 3
    distance = torch.rand(1500, generator=generator)
    angle = 4 * distance + 2 * torch.pi / 3 * arms + 0.15 * torch.randn(1500, generator=generator)
    points = torch.stack([distance * angle.cos(), distance * angle.sin()], dim=1)
    return Rows(points[:1200], arms[:1200], batch_size, seed, held_out=(points[1200:], arms[1200:]))
