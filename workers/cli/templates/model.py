"""Small classifier, as a list of layers that may be cut between any two."""

import torch
from torch import Tensor, nn


def build(width: int = 64) -> nn.Sequential:
    """Return a model: points float32 [rows, 2] -> a score for each of three arms, float32 [rows, 3]."""
    return nn.Sequential(
        nn.Linear(2, width),
        nn.ReLU(),
        nn.Linear(width, width),
        nn.ReLU(),
        nn.Linear(width, 3),
    )


def accuracy(scores: Tensor, arms: Tensor) -> Tensor:
    """Return the share of points whose highest score is their arm's."""
    return (scores.argmax(dim=1) == arms).to(torch.float32).mean()
