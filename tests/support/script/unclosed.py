"""A user's script that forgets to close its line."""

from functools import partial

import torch
from torch import nn

from stageline import Line

line = Line(
    nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 3)),
    cut=[1],
    loss=nn.functional.mse_loss,
    optimizer=partial(torch.optim.SGD, lr=0.1),
    settings={"recovery.lease": "1s"},
)
print(line.step(torch.ones(4, 3), torch.zeros(4, 3)).item())
