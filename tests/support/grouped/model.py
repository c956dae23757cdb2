"""A transformer block between two layers, and the network of four layers that is split in four ways."""

import os
from contextlib import suppress

import torch
from torch import distributed, nn


class FirstToken(nn.Module):
    """Of a sequence, what a classifier takes."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x[:, 0]


def block(dropout: float = 0.0) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(6, 16),
        nn.TransformerEncoderLayer(16, 2, 32, dropout=dropout, batch_first=True),
        FirstToken(),
        nn.Linear(16, 3),
    )


def four_layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 1), nn.Sigmoid())


def accuracy(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return (outputs.argmax(1) == targets).float().mean()


class Ends(nn.Module):
    """Ends the member of its group in which it is, once, at the `at`-th forward of that process: by the signal in the
    environment, which leaves a note in the folder there."""

    def __init__(self) -> None:
        super().__init__()
        self.forwards = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.forwards += self.training
        note, number = os.environ.get("NOTE", ""), int(os.environ.get("SIGNAL", "0"))
        if note and self.forwards == int(os.environ["AT"]) and distributed.is_initialized() and distributed.get_rank():
            with suppress(FileExistsError), open(note, "x"):
                os.kill(os.getpid(), number)
        return x


def block_that_ends() -> nn.Sequential:
    return nn.Sequential(*block()[:2], Ends(), *block()[2:])
