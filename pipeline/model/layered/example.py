"""Examples of a batch's inputs, with which models are traced.

The inputs of every microbatch must be like those of the example, but for the number of rows:

example of 2 rows or more      a graph for microbatches of 2 rows or more
example of 1 row               a graph for microbatches of 1 row

torch.export takes a dimension of size 1 to be 1 for ever, and what it has found for other sizes, it has found for 2 and
more: with 1 row, or none, the model may do something else.
"""

from typing import Any

import torch

from stageline.pipeline.data.batch import rows
from stageline.pipeline.errors import DataError, ModelRefused
from stageline.pipeline.tree import Leaf, Tree, describe, leaves, map_tensors, tensors


class Example:
    """An example of a batch's inputs, with which a model is traced.

    Attributes:
        one_row: True if the example has 1 row; the graph is then for microbatches of 1 row.
    """

    def __init__(self, inputs: Tree) -> None:
        """Make the example.

        Args:
            inputs: A tensor, or tensors and plain values in a tuple, a list or a dict; tensors of shape (rows, ...).

        Raises:
            ModelRefused: The inputs have no rows.
        """
        try:
            count = rows(inputs)
        except DataError as error:
            raise ModelRefused(f"the example that the model is traced with: {error}") from error
        if not count:
            raise ModelRefused("the example that the model is traced with has no rows: give one or more")
        self.one_row = count == 1
        self._inputs = inputs
        self._leaves = dict(leaves(inputs))

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """Tensors with which a graph is traced."""
        return tuple(tensors(self._inputs))

    def call(self, model: torch.nn.Module, given: tuple[torch.Tensor, ...]) -> Any:
        """Return what `model` returns for the example's inputs, with the tensors `given` in place of their own."""
        match self.with_tensors(given):
            case dict() as named:
                return model(**named)
            case tuple() | list() as listed:
                return model(*listed)
            case one:
                return model(one)

    def with_tensors(self, given: tuple[torch.Tensor, ...]) -> Tree:
        """Return the example's inputs, with the tensors `given` in place of their own."""
        found = iter(given)
        return map_tensors(lambda _: next(found), self._inputs)

    def check(self, inputs: Tree, microbatches: int = 1) -> None:
        """Raise `DataError` if a batch's `inputs` are not like the example, or have a number of rows that does not fit.

        Args:
            inputs: Inputs of the batch.
            microbatches: Number of microbatches into which the batch is divided; the graph must be for the rows of
                each.
        """
        given = dict(leaves(inputs))
        if given.keys() != self._leaves.keys():
            raise DataError(
                f"the inputs of a batch are {describe(inputs)}, and the model was traced with "
                f"{describe(self._inputs)}: {_WAY_OUT}"
            )
        for path, wanted in self._leaves.items():
            if difference := _difference(given[path], wanted):
                raise DataError(f"{_title(path)} {difference}: {_WAY_OUT}")
        self._check_rows(rows(inputs), microbatches)

    def taken(self, inputs: Tree) -> tuple[torch.Tensor, ...]:
        """Return the tensors of a microbatch's `inputs`. Raises `DataError` as `check` does."""
        self.check(inputs)
        given = dict(leaves(inputs))
        return tuple(given[path] for path, leaf in self._leaves.items() if isinstance(leaf, torch.Tensor))  # type: ignore[misc]

    def _check_rows(self, count: int, microbatches: int) -> None:
        most = -(-count // microbatches)
        least = count // microbatches or most  # empty microbatches are not computed
        wrong = [size for size in (least, most) if (size != 1 if self.one_row else size < 2)]
        if not wrong:
            return
        title = next(_title(path) for path, leaf in self._leaves.items() if isinstance(leaf, torch.Tensor))
        batch = "" if microbatches == 1 else f" ({_counted(count)} in {microbatches} microbatches)"
        raise DataError(
            f"{title} has {_counted(wrong[0])} in a microbatch{batch}, and the model was traced for microbatches of "
            f"{_ONE_ROW if self.one_row else _MORE_ROWS}"
        )


_ONE_ROW = "1 row, since its example has 1. Give an example of 2 rows or more, or no batch more rows than microbatches"
_MORE_ROWS = (
    "2 rows or more: with fewer it may do something else. Take fewer microbatches, or batches of another size. If the "
    "last batch of an epoch is too small, leave it out: drop_last=True of stageline.Loader or of a DataLoader, "
    "data.drop_last = true of a data.dataset. For microbatches of 1 row each, trace it with an example of 1 row"
)
_WAY_OUT = (
    "all but the number of rows must be as in the example. Bring every batch to one shape, such as by padding, or list "
    "the model's layers: stageline.Layers (docs/guides/models.md)"
)


def _counted(count: int) -> str:
    return "1 row" if count == 1 else f"{count} rows"


def _difference(given: Leaf, wanted: Leaf) -> str:
    """Return in what an input is not like the example's; "" if it is."""
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
    """Return the name of the input at `path`, as text: `['mask']` is "input mask", `[0]` is "input 0"."""
    return f"input {path.strip('[]').strip(chr(39))}" if path else "the input"
