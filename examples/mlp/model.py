"""The two-layer network of a well-known notebook on splitting training across nodes; cut after the ReLU there."""

import torch
from torch import nn

ROWS, FEATURES = 320, 16


def build() -> nn.Sequential:
    """float32 [rows, 16] -> the probability of class 1, float32 [rows, 1].

    The notebook seeds once and draws its data before its weights, so the draws are repeated here (`data.py` makes the
    same ones): only then do the weights come out as the notebook's.
    """
    torch.rand([ROWS, FEATURES])
    torch.randint(0, 2, [ROWS, 1], dtype=torch.float32)
    return nn.Sequential(nn.Linear(FEATURES, 8), nn.ReLU(), nn.Linear(8, 1), nn.Sigmoid())
