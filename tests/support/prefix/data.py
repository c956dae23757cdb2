"""Words, and after each the next. The last batch of an epoch is smaller than a step has microbatches."""

import torch

from stageline.pipeline.data import Rows

ROWS, EPOCH = 27, 4  # the second: batches in it


def batches(batch_size: int, seed: int, shift: int = 0) -> Rows:
    ids = torch.randint(11, (ROWS + 8, 5), generator=torch.Generator().manual_seed(1 + shift))
    targets = ids.roll(-1, 1)
    return Rows(ids[:ROWS], targets[:ROWS], batch_size, seed, held_out=(ids[ROWS:], targets[ROWS:]))
