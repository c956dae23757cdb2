"""Two classes by a formula: which side of a plane through zero a point lies on, and one label in ten is wrong.

The plan's batches have all 512 rows, so that the loss of each step is that of the whole set.
"""

import torch

from stageline import Rows

ROWS, FEATURES, WRONG = 512, 16, 0.1


def batches(batch_size: int, seed: int) -> Rows:
    """Points, float32 [512, 16], from a normal distribution, and their classes, 0 or 1, float32 [512, 1]."""
    generator = torch.Generator().manual_seed(1)
    points = torch.randn(ROWS, FEATURES, generator=generator)
    normal = torch.randn(FEATURES, 1, generator=generator)  # of the plane
    wrong = torch.rand(ROWS, 1, generator=generator) < WRONG
    return Rows(points, ((points @ normal > 0) ^ wrong).float(), batch_size, seed)
