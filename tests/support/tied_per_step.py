"""Counterpart of shared parameters whose gradients meet once per step: own parameters, in plain torch."""

from collections.abc import Sequence
from functools import reduce
from operator import add

from torch import nn


class OwnWeights:
    """Gives the modules that share a `weight` one of their own for each stage, and adds up their gradients at the end
    of a step. `uses` are those modules, by stage."""

    def __init__(self, uses: Sequence[Sequence[nn.Module]]) -> None:
        first = uses[0][0].weight
        self._own = [first, *(nn.Parameter(first.detach().clone()) for _ in uses[1:])]
        for modules, own in zip(uses, self._own, strict=True):
            for module in modules:
                module.weight = own

    @property
    def copies(self) -> list[nn.Parameter]:
        """Those of all stages but the first."""
        return self._own[1:]

    def add_up(self) -> None:
        """Those of the last stage first. Before the optimizer's step."""
        self._own[0].grad = reduce(add, [each.grad for each in reversed(self._own)])
        self.spread()

    def spread(self) -> None:
        """The first stage's gradients are those of all."""
        for each in self.copies:
            each.grad = self._own[0].grad.clone()
