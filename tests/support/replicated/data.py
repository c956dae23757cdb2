"""Points in three clouds."""

import torch

from stageline.pipeline.data import Rows


def batches(batch_size: int, seed: int) -> Rows:
    generator = torch.Generator().manual_seed(1)
    targets = torch.arange(42) % 3
    inputs = torch.randn(42, 5, generator=generator) + targets[:, None]
    return Rows(inputs[:36], targets[:36], batch_size, seed, held_out=(inputs[36:], targets[36:]))
