"""What training loops have, in plain torch over the unsplit model: what runs of stages must equal to the bit.

Random numbers are seeded before each layer, as for every run; else this is the loop that a user would write.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import reduce
from hashlib import sha256
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

Batch = tuple[Tensor, Tensor]


@dataclass
class PlainLoop:
    """Trains `model`, in microbatches of each batch; every `accumulate` batches are a step. `losses` and `norms` have
    an entry for each step."""

    model: nn.Sequential
    loss: Callable[[Tensor, Tensor], Tensor]
    optimizer: torch.optim.Optimizer
    microbatches: int
    accumulate: int = 1
    clip_norm: float | None = None
    lr_scheduler: torch.optim.lr_scheduler.LRScheduler | None = None
    lr_every: int = 1  # steps
    autocast: bool = False
    averaged: AveragedModel | None = None  # of `model`
    seed: int = 0
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)

    def train(self, batches: Iterable[Batch]) -> "PlainLoop":
        given = list(batches)
        for first in range(0, len(given), self.accumulate):
            self._step(given[first : first + self.accumulate])
        return self

    def state(self) -> dict[str, Tensor]:
        return self.model.state_dict()

    def averages(self) -> dict[str, Tensor]:
        assert self.averaged is not None
        return self.averaged.module.state_dict()  # type: ignore[no-any-return]

    def _step(self, batches: Sequence[Batch]) -> None:
        losses: list[Tensor] = []
        rows = sum(len(x) for x, _ in batches)
        for x, y in batches:
            for inputs, targets in zip(
                x.tensor_split(self.microbatches), y.tensor_split(self.microbatches), strict=True
            ):
                with torch.autocast("cpu", torch.bfloat16, enabled=self.autocast, cache_enabled=False):
                    loss = self.loss(self._forward(inputs, len(losses)), targets)
                loss = loss * (len(inputs) / rows)
                loss.backward()
                losses.append(loss.detach())
        self.losses.append(reduce(torch.add, losses).item())
        if self.clip_norm is not None:
            self.norms.append(nn.utils.clip_grad_norm_(self.model.parameters(), self.clip_norm).item())
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.averaged is not None:
            self.averaged.update_parameters(self.model)
        if self.lr_scheduler is not None and len(self.losses) % self.lr_every == 0:
            self.lr_scheduler.step()

    def _forward(self, x: Any, microbatch: int) -> Tensor:
        for number, layer in enumerate(self.model):
            place = f"{self.seed}/{len(self.losses)}/{microbatch}/{number}"
            torch.default_generator.manual_seed(int.from_bytes(sha256(place.encode()).digest()[:8], "little"))
            x = layer(x)
        return x  # type: ignore[no-any-return]


def differing(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> Sequence[str]:
    """The names of what is not the same bits."""
    names = found.keys() | wanted.keys()
    return sorted(
        name for name in names if not (name in found and name in wanted and torch.equal(found[name], wanted[name]))
    )
