"""The inputs that a model was traced with: what those of every microbatch must be like, but for the number of rows."""

from typing import Any

import torch

from stageline.pipeline.data.batch import rows
from stageline.pipeline.errors import DataError, ModelRefused
from stageline.pipeline.tree import Leaf, Tree, describe, leaves, map_tensors, tensors


class Example:
    """`inputs` are what a batch has: a tensor, or tensors and plain values in a tuple, a list or a dict.

    Raises `ModelRefused` if they have no rows.
    """

    def __init__(self, inputs: Tree) -> None:
        try:
            count = rows(inputs)
        except DataError as error:
            raise ModelRefused(f"the example that the model is traced with: {error}") from error
        if not count:
            raise ModelRefused("the example that the model is traced with has no rows: give one or more")
        # torch.export takes a dimension of size 1 to be 1 for ever.
        self._inputs = map_tensors(lambda leaf: torch.cat([leaf, leaf]), inputs) if count == 1 else inputs
        self._leaves = dict(leaves(self._inputs))

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """What a graph is traced with. Each has two rows or more."""
        return tuple(tensors(self._inputs))

    def call(self, model: torch.nn.Module, given: tuple[torch.Tensor, ...]) -> Any:
        """What `model` returns for these inputs, with the tensors `given` in place of their own."""
        found = iter(given)
        match map_tensors(lambda _: next(found), self._inputs):
            case dict() as named:
                return model(**named)
            case tuple() | list() as listed:
                return model(*listed)
            case one:
                return model(one)

    def taken(self, inputs: Tree) -> tuple[torch.Tensor, ...]:
        """The tensors of a microbatch's `inputs`. Raises `DataError` if these are not like the example."""
        given = dict(leaves(inputs))
        if given.keys() != self._leaves.keys():
            raise DataError(
                f"the inputs of a batch are {describe(inputs)}, and the model was traced with "
                f"{describe(self._inputs)}: {_WAY_OUT}"
            )
        for path, wanted in self._leaves.items():
            if difference := _difference(given[path], wanted):
                raise DataError(f"{_title(path)} {difference}: {_WAY_OUT}")
        return tuple(given[path] for path, leaf in self._leaves.items() if isinstance(leaf, torch.Tensor))  # type: ignore[misc]


_WAY_OUT = (
    "all but the number of rows must be as in the example. Bring every batch to one shape, such as by padding, or list "
    "the model's layers: stageline.Layers (docs/models.md)"
)


def _difference(given: Leaf, wanted: Leaf) -> str:
    """In which way an input is not like the example's; "" if it is."""
    if not isinstance(given, torch.Tensor) or not isinstance(wanted, torch.Tensor):
        same = type(given) is type(wanted) and given == wanted
        return "" if same else f"is {describe(given)}, and the model was traced with {describe(wanted)}"
    if given.dtype != wanted.dtype or given.dim() != wanted.dim():
        return f"is {describe(given)}, and the model was traced with {describe(wanted)}"
    for dimension in range(1, given.dim()):
        if given.shape[dimension] != wanted.shape[dimension]:
            return (
                f"has {given.shape[dimension]} in dimension {dimension} ({describe(given)}), and the model was traced "
                f"with {wanted.shape[dimension]} there"
            )
    return ""


def _title(path: str) -> str:
    """What the input at `path` is called: `['mask']` is "input mask", `[0]` is "input 0"."""
    return f"input {path.strip('[]').strip(chr(39))}" if path else "the input"
