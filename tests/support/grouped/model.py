"""A transformer block between two layers."""

import os
from contextlib import suppress
from pathlib import Path

import torch
from torch import distributed, nn


class FirstToken(nn.Module):
    """Of a sequence, what a classifier takes."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x[:, 0]


class Ends(nn.Module):
    """Sends a signal to the group's second process in which it is, once, at its `at`-th forward there; `note` is a file
    that says that it has. Forks that process if `number`, the signal's, is 0."""

    def __init__(self, note: str, at: int, number: int) -> None:
        super().__init__()
        self.note, self.at, self.number, self.forwards = Path(note), at, number, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.forwards += self.training
        if self.forwards == self.at and distributed.is_initialized() and distributed.get_rank():
            with suppress(FileExistsError):
                self.note.touch(exist_ok=False)
                os.kill(os.getpid(), self.number) if self.number else os.fork()
        return x


def build(dropout: float = 0.0, note: str = "", at: int = 0, number: int = 0) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(6, 16),
        nn.Sequential(nn.TransformerEncoderLayer(16, 2, 32, dropout=dropout, batch_first=True), Ends(note, at, number)),
        FirstToken(),
        nn.Linear(16, 3),
    )


def accuracy(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return (outputs.argmax(1) == targets).float().mean()
