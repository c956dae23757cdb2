"""Parameters that stages share: each stage has a copy of its own, and the stages exchange the gradients.

    stage 0 (owner)                                 stage 3
    gradients that join its own  <-- leaving --     gradients of each backward
    or, its sums of the step     <-- subtotal -     sums over the step
    their sums over the step     --- totals -->     gradients of the update

With `leaving` the owner's `.grad` is what autograd accumulates for one parameter. Why: docs/project/decisions/tied.md.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch

from stageline.pipeline.errors import GradientMismatch
from stageline.pipeline.feature import Compute, Feature, Operation
from stageline.pipeline.stage.layers.memory import copied
from stageline.pipeline.tree import Tree, describe

_Gradients = dict[str, torch.Tensor | None]


@dataclass(frozen=True, slots=True)
class SharedParameters:
    """The parameters that a stage shares with others, each called by its name in the first stage that uses it.

    A parameter whose gradients only pass through this stage is in `above` and `below`, but not in `own`.

    Attributes:
        own: Shared parameters that this stage uses, with their names here.
        above: Parameters whose gradients come from a later stage, and whose totals go there.
        below: Parameters whose gradients go to an earlier stage.
    """

    own: Mapping[str, str] = field(default_factory=dict)
    above: frozenset[str] = frozenset()
    below: frozenset[str] = frozenset()

    def __bool__(self) -> bool:
        """Return True if gradients come from or go to another stage."""
        return bool(self.above or self.below)


class SharedGradients(Feature):
    """The feature that sums gradients of shared parameters at the first stage that uses them, and returns the totals.

    Backwards take what the later stage sends as roots of their own. An update takes the totals of the earlier stage,
    and returns those for the later one.
    """

    name = "ties"

    def __init__(self) -> None:
        """Begin without gradients of any stage."""
        self._of: WeakKeyDictionary[Any, TiedGradients] = WeakKeyDictionary()

    def handlers(self, stage: Any) -> Mapping[str, Compute]:
        """Return the functions that compute `T` (leaving gradients) and `S` (subtotals) on `stage`.

        There are none if the stage shares nothing.
        """
        if not stage.shared:
            return {}
        gradients = self.of(stage)
        return {
            "T": lambda operation, received: gradients.leaving(),
            "S": lambda operation, received: gradients.subtotal(*received),
        }

    def around(self, stage: Any, kind: str, compute: Compute) -> Compute:
        """Return `compute` with the exchange of shared gradients, for backwards and updates.

        `B` and `W` pass received gradients on as roots. `U` takes totals before the update, and returns those for the
        later stage.
        """
        if not stage.shared or kind not in ("B", "W", "U"):
            return compute
        gradients, own = self.of(stage), 1 if kind == "B" else 0

        def backward(operation: Operation, received: Sequence[Tree]) -> Tree:
            roots = tuple(gradients.roots(*received[own:]))
            return compute(operation, [*received[:own], roots])

        def update(operation: Operation, received: Sequence[Tree]) -> Tree:
            given = gradients.exchange(*received)
            compute(operation, ())
            return given

        return update if kind == "U" else backward

    def of(self, stage: Any) -> "TiedGradients":
        """Return the shared gradients of `stage` that are on their way."""
        if stage not in self._of:
            self._of[stage] = TiedGradients(stage.index, stage.shared, stage.parameters())
        return self._of[stage]


def copies_in(stages: Iterable[Any]) -> dict[str, str]:
    """Return the parameters that `stages` share with an earlier stage.

    The keys are their names here, the values their names in the first stage that uses them.
    """
    own = (stage.shared.own for stage in stages)
    return {here: first for names in own for first, here in names.items() if here != first}


class TiedGradients:
    """The gradients of the parameters that one stage shares, on their way between stages."""

    def __init__(self, stage: int, shared: SharedParameters, parameters: Mapping[str, torch.Tensor]) -> None:
        """Begin without gradients.

        Args:
            stage: Number of the stage, for errors.
            shared: The parameters that the stage shares.
            parameters: All parameters of the stage, by their names here.
        """
        self._stage = stage
        self._above = sorted(shared.above)
        self._below = sorted(shared.below)
        self._own = {name: parameters[here] for name, here in shared.own.items()}
        self._passing: _Gradients = {}

    def roots(self, received: Tree = None) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return the stage's own parameters with the gradients that a later stage has sent for them.

        They are roots of a backward, to which autograd adds this stage's own gradients.

        Args:
            received: Gradients by name, as `leaving` returned them on the later stage; None if nothing was received.

        Raises:
            GradientMismatch: `received` has gradients of other parameters, or one of another shape or dtype.
        """
        self._passing = given = self._named(received, self._above)
        return [(self._own[name], each) for name, each in given.items() if name in self._own and each is not None]

    def leaving(self) -> Tree:
        """Return the gradients since the last call that go to the earlier stage, by name; None for one that got none.

        The stage's own are taken out of `.grad`.
        """
        passing, self._passing = self._passing, {}
        return {name: self._taken(name) if name in self._own else passing.get(name) for name in self._below}

    def subtotal(self, received: Tree = None) -> Tree:
        """Return the step's gradients for the earlier stage; None if there is no earlier stage.

        Args:
            received: The later stage's subtotal, which is added; None if nothing was received.

        Raises:
            GradientMismatch: `received` has gradients of other parameters, or one of another shape or dtype.
        """
        self._passing = given = self._named(received, self._above)
        for name, later in given.items():
            if name in self._own:
                self._own[name].grad = _sum(later, self._own[name].grad)
        return self.leaving() if self._below else None

    def exchange(self, totals: Tree = None) -> Tree:
        """Set the gradients for an update from their totals, and return the totals for the later stage.

        Args:
            totals: Totals from the earlier stage, by name; None if nothing was received.

        Returns:
            Totals by name; None if there is no later stage.

        Raises:
            GradientMismatch: `totals` has gradients of other parameters, or one of another shape or dtype.
        """
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
        """Return a copy of the gradient of the own parameter `name`, since an optimizer may write to gradients."""
        gradient = self._own[name].grad
        return None if gradient is None else copied(gradient)

    def _named(self, received: Tree, names: list[str]) -> _Gradients:
        """Return `received` on the parameters' devices; an empty dict if nothing was received.

        Raises `GradientMismatch` unless `received` is a dict with exactly these `names`.
        """
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
