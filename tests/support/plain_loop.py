"""Training loops in plain torch over the unsplit model: runs of stages must equal them to the bit.

Random numbers are seeded before each layer, as for every run; else this is the loop that a user would write.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from functools import reduce
from hashlib import sha256
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

Batch = tuple[Tensor, Tensor]


Groups = Sequence[Sequence[int]]  # of a stage: the microbatches of each of its replicas


@dataclass
class PlainLoop:
    """Trains `model`, in microbatches of each batch; every `accumulate` batches are a step. `losses` and `norms` have
    an entry for each step.

    Stages have a part in three of its options only. `delays`: by how many updates the weights that each stage reads are
    late (PipeDream, SOSP'19; PipeDream-2BW, arXiv 2006.09503, section 3.1); its gradients are applied to the newest.
    `groups`: gradients of each stage are added up in groups of microbatches, and then those of the groups. `copies`:
    names of parameters that are copies of the one named with each, in a later stage; gradients are added up at the end
    of a step, those of the last stage first.
    """

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
    cut: Sequence[int] = ()  # layers that stages 1, 2, ... begin with
    delays: Sequence[int] = ()  # of stages; none is late by default
    groups: Sequence[Groups] = ()  # of stages; by default one group with all microbatches
    copies: Mapping[str, str] = field(default_factory=dict)
    left_out: Callable[[Tensor], bool] = lambda targets: False
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    versions: list[nn.Sequential] = field(default_factory=list)  # after 0, 1, ... updates, if stages are late

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
        losses, gradients = [], []
        rows, layers = sum(len(x) for x, _ in batches), self._layers_that_are_read()
        parts = [part for batch in batches for part in self._parts(*batch)]
        for microbatch, (inputs, targets) in enumerate(parts):
            if len(targets) and not self.left_out(targets):
                with torch.autocast("cpu", torch.bfloat16, enabled=self.autocast, cache_enabled=False):
                    loss = self.loss(self._forward(layers, inputs, microbatch), targets)
                loss = loss * (len(inputs) / rows)
                loss.backward()
                losses.append(loss.detach())
            gradients.append({name: each.grad for name, each in layers.named_parameters()})
            layers.zero_grad()
        self.losses.append(reduce(torch.add, losses).item())
        for name, parameter in self.model.named_parameters():
            groups = self.groups[self._stage(name)] if self.groups else [range(len(parts))]
            parameter.grad = _sum(_sum(gradients[each][name] for each in group) for group in groups)
        self._update()

    def _update(self) -> None:
        named = dict(self.model.named_parameters())
        for copy, first in self.copies.items():
            named[first].grad = _sum((named[copy].grad, named[first].grad))
        own = [each for name, each in named.items() if name not in self.copies]
        if self.clip_norm is not None:
            self.norms.append(nn.utils.clip_grad_norm_(own, self.clip_norm).item())
        self.optimizer.step()
        self.model.zero_grad()
        for copy, first in self.copies.items():
            named[copy].data.copy_(named[first].data)
        if self.averaged is not None:
            self.averaged.update_parameters(self.model)
        if self.lr_scheduler is not None and len(self.losses) % self.lr_every == 0:
            self.lr_scheduler.step()

    def _parts(self, x: Tensor, y: Tensor) -> Iterable[Batch]:
        return zip(x.tensor_split(self.microbatches), y.tensor_split(self.microbatches), strict=True)

    def _layers_that_are_read(self) -> nn.Sequential:
        if not any(self.delays):
            return self.model
        self.versions.append(deepcopy(self.model, {id(buffer): buffer for buffer in self.model.buffers()}))
        newest = len(self.versions) - 1
        return nn.Sequential(
            *(self.versions[max(0, newest - self.delays[self._stage(str(n))])][n] for n in range(len(self.model)))
        )

    def _stage(self, name: str) -> int:
        return sum(int(name.split(".")[0]) >= first for first in self.cut)

    def _forward(self, layers: nn.Sequential, x: Any, microbatch: int) -> Tensor:
        for number, layer in enumerate(layers):
            place = f"{self.seed}/{len(self.losses)}/{microbatch}/{number}"
            torch.default_generator.manual_seed(int.from_bytes(sha256(place.encode()).digest()[:8], "little"))
            x = layer(x)
        return x  # type: ignore[no-any-return]


def _sum(gradients: Iterable[Tensor | None]) -> Tensor | None:
    found = [each for each in gradients if each is not None]
    return reduce(torch.add, found) if found else None


def differing(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> Sequence[str]:
    """The names of what is not the same bits."""
    names = found.keys() | wanted.keys()
    return sorted(
        name for name in names if not (name in found and name in wanted and torch.equal(found[name], wanted[name]))
    )
