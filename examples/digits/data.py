"""scikit-learn's handwritten digits: 1797 real images of 8x8 pixels, a fifth of them held out."""

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

from stageline import Batch, Rows


def batches(batch_size: int, seed: int) -> Rows:
    """Images float32 [rows, 1, 8, 8] from 0 to 1, and digits int64 [rows]. The seed shuffles; the split is fixed."""
    digits = load_digits()
    seen, held_out = train_test_split(range(len(digits.target)), test_size=0.2, random_state=0, stratify=digits.target)
    images = torch.from_numpy(digits.images).to(torch.float32).div(16).unsqueeze(1)
    labels = torch.from_numpy(digits.target)

    def select(rows: list[int]) -> Batch:
        return images[rows], labels[rows]

    return Rows(*select(seen), batch_size, seed, held_out=select(held_out))
