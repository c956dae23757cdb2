"""Points in three clouds; the rows held out make two batches, the second of three rows."""

import torch

from stageline.pipeline.data import Rows


def batches(batch_size: int, seed: int) -> Rows:
    generator = torch.Generator().manual_seed(1)
    targets = torch.arange(45) % 3
    inputs = torch.randn(45, 5, generator=generator) + targets[:, None] * 0.4
    return Rows(inputs[:36], targets[:36], batch_size, seed, held_out=(inputs[36:], targets[36:]))
