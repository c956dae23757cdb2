"""The network of a well-known teaching notebook, which trains it on one node, data-parallel and tensor-parallel."""

from torch import nn

FEATURES = 16


def build() -> nn.Sequential:
    """float32 [rows, 16] -> the probability of class 1, float32 [rows, 1]."""
    return nn.Sequential(nn.Linear(FEATURES, 8), nn.ReLU(), nn.Linear(8, 1), nn.Sigmoid())
