"""Examples of a batch's inputs, with which models are traced.

The inputs of every microbatch must be like those of the example, but for the number of rows, and the number of tokens:

example of 2 rows or more      a graph for microbatches of 2 rows or more, and of 1 row if that has the model's bits
example of 1 row               a graph for microbatches of 1 row

torch.export takes a dimension of size 1 to be 1 for ever, and what it has found for other sizes, it has found for 2 and
more: with 1 row the model may do something else, which is compared. What else a forward asks of sizes, torch.export
tells.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch.export import Dim

from stageline.pipeline.data.batch import rows
from stageline.pipeline.errors import DataError, ModelRefused
from stageline.pipeline.tree import Leaf, Tree, describe, leaves, map_tensors, tensors

from .sizes import Sizes, depend, open_sizes


class Example:
    """An example of a batch's inputs, with which a model is traced.

    Attributes:
        inputs: The inputs.
        rows: Numbers of rows that a microbatch may have.
        tokens: Sizes that dimension 1 of all inputs may have; None if the inputs have nothing of that kind, or if it is
            as in the example.
    """

    def __init__(self, inputs: Tree, rows_of: Sizes | None = None, tokens: Sizes | None = None) -> None:
        """Make the example.

        Args:
            inputs: A tensor, or tensors and plain values in a tuple, a list or a dict; tensors of shape (rows, ...).
            rows_of: Numbers of rows that a microbatch may have; None for those that torch.export takes for alike.
            tokens: Sizes that dimension 1 of all inputs may have; None for those of the example.

        Raises:
            ModelRefused: The inputs have no rows.
        """
        try:
            self._count = rows(inputs)
        except DataError as error:
            raise ModelRefused(f"the example that the model is traced with: {error}") from error
        if not self._count:
            raise ModelRefused("the example that the model is traced with has no rows: give one or more")
        self.rows = rows_of or (Sizes(1, 1) if self._count == 1 else Sizes(2))
        self.tokens = tokens
        self.inputs = inputs
        self._leaves = dict(leaves(inputs))

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """Tensors with which a graph is traced."""
        return tuple(tensors(self.inputs))

    @property
    def free(self) -> tuple[dict[int, Any], ...]:
        """The dimensions of each tensor whose size torch.export shall leave open."""
        open_rows = {} if self.rows.is_one else {0: Dim.AUTO}
        open_tokens = {} if self.tokens is None or self.tokens.is_one else {1: Dim.AUTO}
        return tuple(open_rows | (open_tokens if each.dim() > 1 else {}) for each in self.tensors)

    @property
    def length(self) -> int:
        """Size of dimension 1, if all inputs that have one share it and one of them has whole numbers; 0 if not so.

        Such inputs are texts: tokens, and what belongs to each of them.
        """
        wide = [each for each in self.tensors if each.dim() > 1]
        sizes = {each.shape[1] for each in wide}
        has_numbers = any(each.dtype in (torch.int64, torch.int32) for each in wide)
        return sizes.pop() if len(sizes) == 1 and has_numbers else 0

    def of_any_length(self) -> "Example | None":
        """Return the example with texts of any length; None if the inputs are no texts."""
        return Example(self.inputs, self.rows, Sizes(2)) if self.length > 1 else None

    def narrowed(self, given: Sequence[torch.Tensor]) -> "Example":
        """Return the example with those of its sizes that a graph is for.

        Args:
            given: torch.export's stand-ins for the tensors.

        Raises:
            ModelRefused: The forward asks something of the rows and the tokens at once.
        """
        found = self.rows.within(open_sizes(given, 0, self._count))
        if self.tokens is None:
            return Example(self.inputs, found)
        if depend(given, 0, 1):
            raise ModelRefused("the forward compares the number of rows with that of tokens")
        return Example(self.inputs, found, self.tokens.within(open_sizes(given, 1, self.length)))

    def from_one_row(self) -> "Example | None":
        """Return the example, for one row, too; None unless it is for two rows or more."""
        return Example(self.inputs, Sizes(1, self.rows.most), self.tokens) if self.rows.least == 2 else None

    def first_row(self) -> "Example":
        """Return an example of the first row."""
        return Example(map_tensors(lambda each: each[:1], self.inputs))

    def of_another_length(self) -> "Example | None":
        """Return an example of texts of about half the length, or if they cannot be so short, of one token more.

        Returns None if the length is fixed.
        """
        if self.tokens is None or self.tokens.is_one:
            return None
        half = max(self.tokens.least, (self.length + 1) // 2)
        if half < self.length:
            return Example(map_tensors(lambda each: each[:, :half] if each.dim() > 1 else each, self.inputs))
        longer = map_tensors(lambda each: torch.cat([each, each[:, -1:]], 1) if each.dim() > 1 else each, self.inputs)
        return Example(longer) if self.tokens.has(self.length + 1) else None

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
        return map_tensors(lambda _: next(found), self.inputs)

    def check(self, inputs: Tree, microbatches: int = 1) -> None:
        """Raise `DataError` if a batch's `inputs` are not like the example, or have a size that does not fit.

        Args:
            inputs: Inputs of the batch.
            microbatches: Number of microbatches into which the batch is divided; the graph must be for the rows of
                each.
        """
        given = dict(leaves(inputs))
        if given.keys() != self._leaves.keys():
            raise DataError(
                f"the inputs of a batch are {describe(inputs)}, and the model was traced with "
                f"{describe(self.inputs)}: {_WAY_OUT}"
            )
        first = 1 if self.tokens is None else 2
        for path, wanted in self._leaves.items():
            if difference := _difference(given[path], wanted, first):
                raise DataError(f"{_title(path)} {difference}: {_way_out_of(given[path], wanted)}")
        if self.tokens is not None:
            _check_length(given, self.tokens)
        self._check_rows(rows(inputs), microbatches)

    def taken(self, inputs: Tree) -> tuple[torch.Tensor, ...]:
        """Return the tensors of a microbatch's `inputs`. Raises `DataError` as `check` does."""
        self.check(inputs)
        given = dict(leaves(inputs))
        return tuple(given[path] for path, leaf in self._leaves.items() if isinstance(leaf, torch.Tensor))  # type: ignore[misc]

    def _check_rows(self, count: int, microbatches: int) -> None:
        most = -(-count // microbatches)
        least = count // microbatches or most
        wrong = [size for size in (least, most) if size and not self.rows.has(size)]  # without rows, none is computed
        if not wrong:
            return
        title = next(_title(path) for path, leaf in self._leaves.items() if isinstance(leaf, torch.Tensor))
        batch = "" if microbatches == 1 else f" ({_counted(count)} in {microbatches} microbatches)"
        raise DataError(
            f"{title} has {_counted(wrong[0])} in a microbatch{batch}, and the model was traced for microbatches of "
            f"{self.rows.of('rows')}{self._way_out_of(wrong[0])}"
        )

    def _way_out_of(self, count: int) -> str:
        if self.rows.is_one:
            return f", since {_ONE_ROW if self._count == 1 else _ONE_SIZE}"
        return f": {_MORE_ROWS if count < self.rows.least else _FEWER_ROWS}"


_ONE_ROW = (
    "its example, or the first microbatch of a line, has 1. Begin with 2 rows or more, or give no batch more rows than "
    "microbatches"
)
_ONE_SIZE = (
    "its forward needs that number. Give an example with the rows of one microbatch, and all batches the rows of their "
    "microbatches"
)
_FEWER_ROWS = "with more it may do something else. Take more microbatches, or smaller batches"
_MORE_ROWS = (
    "with fewer it may do something else. Take fewer microbatches, or batches of another size. If the last batch of an "
    "epoch is too small, leave it out: drop_last=True of stageline.Loader or of a DataLoader, data.drop_last = true of "
    "a data.dataset; for rows held out, evaluate batches of another size. For microbatches of 1 row each, trace it "
    "with an example of 1 row"
)
_WAY_OUT = (
    "all but the number of rows must be as in the example. Bring every batch to one shape, such as by padding, or list "
    "the model's layers: stageline.Layers (docs/guides/models.md)"
)


_CONSTANT = (
    "None, numbers and texts are constants of the graph. Give a value that changes between batches as a tensor, or "
    "list the model's layers: stageline.Layers (docs/guides/models.md)"
)


def _way_out_of(given: Leaf, wanted: Leaf) -> str:
    both = isinstance(given, torch.Tensor) and isinstance(wanted, torch.Tensor)
    return _WAY_OUT if both else _CONSTANT


def _counted(count: int) -> str:
    return "1 row" if count == 1 else f"{count} rows"


def _check_length(given: dict[str, Leaf], tokens: Sizes) -> None:
    """Raise `DataError` unless all inputs that have a dimension 1 have one of the sizes `tokens` there."""
    wide = {path: leaf for path, leaf in given.items() if isinstance(leaf, torch.Tensor) and leaf.dim() > 1}
    (first, size), *others = ((path, leaf.shape[1]) for path, leaf in wide.items())
    if not tokens.has(size):
        raise DataError(
            f"{_title(first)} has {size} in dimension 1 ({describe(wide[first])}), and the model was traced for "
            f"{tokens.of('tokens')} there: {_WAY_OUT}"
        )
    for path, other in others:
        if other != size:
            raise DataError(
                f"{_title(path)} has {other} in dimension 1 ({describe(wide[path])}), and {_title(first)} {size} "
                f"({describe(wide[first])}); in the example they have the same number"
            )


def _difference(given: Leaf, wanted: Leaf, first: int) -> str:
    """Return in what an input is not like the example's, in shape from dimension `first` on; "" if it is."""
    if not isinstance(given, torch.Tensor) or not isinstance(wanted, torch.Tensor):
        same = type(given) is type(wanted) and given == wanted
        return "" if same else f"is {describe(given)}, and the model was traced with {describe(wanted)}"
    if given.dtype != wanted.dtype or given.dim() != wanted.dim():
        return f"is {describe(given)}, and the model was traced with {describe(wanted)}"
    for dimension in range(first, given.dim()):
        if given.shape[dimension] != wanted.shape[dimension]:
            return (
                f"has {given.shape[dimension]} in dimension {dimension} ({describe(given)}), and the model was traced "
                f"with {wanted.shape[dimension]} there"
            )
    return ""


def _title(path: str) -> str:
    """Return the name of the input at `path`, as text: `['mask']` is "input mask", `[0]` is "input 0"."""
    return f"input {path.strip('[]').strip(chr(39))}" if path else "the input"
