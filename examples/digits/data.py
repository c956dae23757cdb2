"""scikit-learn's handwritten digits: 1797 real images of 8x8 pixels, a fifth of them held out."""

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

from stageline import Batch, Rows


def split() -> tuple[Batch, Batch]:
    """The images to train on and those held out: images float32 [rows, 1, 8, 8] from 0 to 1, digits int64 [rows]."""
    digits = load_digits()
    seen, held_out = train_test_split(range(len(digits.target)), test_size=0.2, random_state=0, stratify=digits.target)
    images = torch.from_numpy(digits.images).to(torch.float32).div(16).unsqueeze(1)
    labels = torch.from_numpy(digits.target)
    return (images[seen], labels[seen]), (images[held_out], labels[held_out])


def batches(batch_size: int, seed: int) -> Rows:
    """The seed shuffles; the split is fixed."""
    seen, held_out = split()
    return Rows(*seen, batch_size, seed, held_out=held_out)
