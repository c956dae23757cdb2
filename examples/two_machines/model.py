"""The net of examples/digits, as a list of layers that may be cut between any two. Every machine has this file."""

import torch
from torch import Tensor, nn


def build(width: int = 24, dropout: float = 0.2) -> nn.Sequential:
    """float32 images [rows, 1, 8, 8] -> a score for each digit, float32 [rows, 10]."""
    return nn.Sequential(
        nn.Conv2d(1, width, 3, padding=1),
        nn.GroupNorm(4, width),  # looks at one image at a time: microbatches change nothing, as BatchNorm's would
        nn.ReLU(),
        nn.Conv2d(width, width, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(width, 2 * width, 3, padding=1),
        nn.GroupNorm(4, 2 * width),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Dropout(dropout),
        nn.Linear(8 * width, 10),
    )


def accuracy(scores: Tensor, digits: Tensor) -> Tensor:
    """The share of images whose highest score is their digit's."""
    return (scores.argmax(dim=1) == digits).to(torch.float32).mean()
