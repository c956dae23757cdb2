"""A stage that shares parameters with others: each has a copy of its own, and they send each other its gradients.

In a loop of your own, after the forwards, for two stages of which the first has what both use:

    gradient = last.backward()
    first.backward(gradient, tied=last.leaving())
    last.exchange(first.exchange())                   in place of update()

Or, if gradients are to meet once per step only, with other bits:

    first.backward(last.backward())                   for each microbatch
    first.subtotal(last.subtotal())
    last.exchange(first.exchange())
"""

from collections.abc import Iterable
from typing import Any

import torch

from stageline.pipeline.tree import Tree

from .stage import NOT_GIVEN, Stage, _NotGiven
from .tied import SharedParameters, TiedGradients


class TiedStage(Stage):
    """`shared` are the parameters; the other arguments are those of a `Stage`."""

    def __init__(self, *args: Any, shared: SharedParameters, **options: Any) -> None:
        super().__init__(*args, **options)
        self.shared = shared
        self._tied = TiedGradients(self.index, shared, self._body.unsplit_parameters())

    def backward(
        self,
        gradient: "Tree | _NotGiven" = NOT_GIVEN,
        *,
        step: int | None = None,
        microbatch: int | None = None,
        owned: bool = False,
        tied: Tree = None,
    ) -> Tree:
        """As that of any stage. `tied`: what the later stage's `leaving` gave after its own backward, to which autograd
        adds this stage's gradients. Raises `GradientMismatch` for what is not of the parameters that they share."""
        self._roots = self._tied.roots(tied)
        result = super().backward(gradient, step=step, microbatch=microbatch, owned=owned)
        if self._roots:  # the stage had nothing to run backward
            parameters, gradients = zip(*self._roots, strict=True)
            torch.autograd.backward(parameters, gradients)
            self._roots = []
        return result

    def backward_weight(self, *, step: int | None = None, microbatch: int | None = None, tied: Tree = None) -> None:
        """As that of any stage; `tied` as in `backward`."""
        self._roots = self._tied.roots(tied)
        super().backward_weight(step=step, microbatch=microbatch)

    def leaving(self) -> Tree:
        """After each backward: its gradients with respect to the parameters that an earlier stage uses too, by their
        names there; None for one that got none."""
        return self._tied.leaving()

    def subtotal(self, received: Tree = None) -> Tree:
        """In place of `leaving`, once after all backwards of a step: the same, of the step. `received`: what that of
        the later stage returned, to which this stage's are added. None if no earlier stage uses its parameters."""
        return self._tied.subtotal(received)

    def exchange(self, totals: Tree = None, *, step: int | None = None) -> Tree:
        """The stage's update. `totals`: what that of the earlier stage returned, the step's gradients of what both use.
        Returns the same for a later stage; None if no later one uses this stage's parameters."""
        given = self._tied.exchange(totals)
        self.update(step)
        return given


def copies_in(stages: Iterable[Stage]) -> dict[str, str]:
    """The parameters that `stages` share with an earlier one: their names here, each with that in the first stage."""
    shared = (stage.shared.own for stage in stages if isinstance(stage, TiedStage))
    return {here: first for own in shared for first, here in own.items() if here != first}
