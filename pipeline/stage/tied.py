"""Gradients of parameters that stages share: they meet at the first stage that uses them, and come back as totals.

    stage 0 (owner)                                 stage 3
    gradients that join its own  <-- leaving --     gradients of each backward
    or, its sums of the step     <-- subtotal -     sums over the step
    their sums over the step     --- totals -->     gradients of the update

With `leaving` the owner's `.grad` is what autograd accumulates for one parameter. Why: docs/decisions/tied.md.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from stageline.pipeline.errors import GradientMismatch
from stageline.pipeline.tree import Tree, describe

from .layers.memory import copied

_Gradients = dict[str, torch.Tensor | None]


@dataclass(frozen=True, slots=True)
class SharedParameters:
    """What a stage shares with others. Each parameter is called by its name in the first stage that uses it.

    `own` are those that this stage uses, with their names here; `above` those whose gradients come from a later stage,
    and whose totals go there; `below` those whose gradients go to an earlier one. One that only passes through is in
    both, and not the stage's own.
    """

    own: Mapping[str, str] = field(default_factory=dict)
    above: frozenset[str] = frozenset()
    below: frozenset[str] = frozenset()

    def __bool__(self) -> bool:
        return bool(self.above or self.below)


class TiedGradients:
    """The gradients of what stage number `stage` shares, on their way. `parameters`: its own, by their names here."""

    def __init__(self, stage: int, shared: SharedParameters, parameters: Mapping[str, torch.Tensor]) -> None:
        self._stage = stage
        self._above = sorted(shared.above)
        self._below = sorted(shared.below)
        self._own = {name: parameters[here] for name, here in shared.own.items()}
        self._passing: _Gradients = {}

    def roots(self, received: Tree) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Parameters with the gradients that were `received` for them from a later stage: as roots of a backward, to
        which autograd adds this stage's own. Raises `GradientMismatch` for gradients that are not of them."""
        self._passing = given = self._named(received, self._above)
        return [(self._own[name], each) for name, each in given.items() if name in self._own and each is not None]

    def leaving(self) -> Tree:
        """The gradients since the last call for the earlier stage, by name; None for one that got none."""
        passing, self._passing = self._passing, {}
        return {name: self._taken(name) if name in self._own else passing.get(name) for name in self._below}

    def subtotal(self, received: Tree) -> Tree:
        """The step's gradients for the earlier stage, those added that were `received` from a later one; None if there
        is no earlier stage. Raises `GradientMismatch` as `roots` does."""
        self._passing = given = self._named(received, self._above)
        for name, later in given.items():
            if name in self._own:
                self._own[name].grad = _sum(later, self._own[name].grad)
        return self.leaving() if self._below else None

    def exchange(self, totals: Tree) -> Tree:
        """Before an update: sets the gradients whose `totals` come from the earlier stage, and returns the totals for
        the later one; None if there is none. Raises `GradientMismatch` as `roots` does."""
        given = self._named(totals, self._below)
        for name, total in given.items():
            if name in self._own:
                self._own[name].grad = total
        if not self._above:
            return None
        return {name: self._total(name) if name in self._own else given.get(name) for name in self._above}

    def _taken(self, name: str) -> torch.Tensor | None:
        parameter = self._own[name]
        gradient, parameter.grad = parameter.grad, None
        return gradient

    def _total(self, name: str) -> torch.Tensor | None:
        """A copy: an optimizer may write to gradients."""
        gradient = self._own[name].grad
        return None if gradient is None else copied(gradient)

    def _named(self, received: Tree, names: list[str]) -> _Gradients:
        """`received`, of exactly these `names`, on the parameters' devices; nothing if nothing was received."""
        if received is None:
            return {}
        if not isinstance(received, dict) or sorted(received) != names:
            raise GradientMismatch(
                f"stage {self._stage} got {describe(received)} for the parameters that it shares; expected a dict of "
                f"gradients, for {', '.join(names)}"
            )
        return {name: self._checked(name, each) for name, each in received.items()}

    def _checked(self, name: str, gradient: Tree) -> torch.Tensor | None:
        parameter = self._own.get(name)
        if gradient is None or (parameter is None and isinstance(gradient, torch.Tensor)):
            return gradient
        if (
            isinstance(gradient, torch.Tensor)
            and parameter is not None
            and (gradient.shape, gradient.dtype) == (parameter.shape, parameter.dtype)
        ):
            return gradient.to(parameter.device)
        raise GradientMismatch(
            f"stage {self._stage} got a gradient of {describe(gradient)} for {name}, which is "
            f"{'not its own' if parameter is None else describe(parameter)}"
        )


def _sum(later: torch.Tensor | None, earlier: torch.Tensor | None) -> torch.Tensor | None:
    return later + earlier if later is not None and earlier is not None else earlier if later is None else later
