"""Words, and after each the next."""

import torch

from stageline.pipeline.data import Rows


def batches(batch_size: int, seed: int) -> Rows:
    ids = torch.randint(11, (104, 5), generator=torch.Generator().manual_seed(1))
    targets = ids.roll(-1, 1)
    return Rows(ids[:96], targets[:96], batch_size, seed, held_out=(ids[96:], targets[96:]))
