"""Rows of which the label is the product of two signs."""

import torch

from stageline import Rows


def batches(batch_size: int, seed: int) -> Rows:
    generator = torch.Generator().manual_seed(1)
    labels = torch.randint(2, (320,), generator=generator)
    first = 2.0 * torch.randint(2, (320,), generator=generator) - 1
    noise = 0.2 * torch.randn(320, 2, generator=generator)
    signs = torch.stack([first, first * (2 * labels - 1)], 1) + noise
    return Rows(torch.cat([signs, torch.zeros(320, 2)], 1), labels, batch_size, seed)
