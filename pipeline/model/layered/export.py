"""Traces of a model's forward by torch.export: a graph of torch's operators, with a marker before each module's call.

    marker                        here begins the call of conv1
    x1 = conv2d(x, conv1_weight)
    marker                        here begins the call of bn1
    x2 = batch_norm(x1, ...)

The markers are those of torch.distributed.pipelining; forward pre-hooks put them there.

The inputs of every microbatch must be like those of the example, but for the number of rows:

example of 2 rows or more      a graph for microbatches of 2 rows or more
example of 1 row               a graph for microbatches of 1 row

torch.export takes a dimension of size 1 to be 1 for ever, and what it has found for other sizes, it has found for 2 and
more: with 1 row, or none, the model may do something else.
"""

import logging
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass
from functools import partial
from io import StringIO
from typing import Any

import torch
from torch.distributed.pipelining import pipe_split
from torch.export import Dim, ExportedProgram
from torch.export.graph_signature import InputKind
from torch.fx import GraphModule

from stageline.pipeline.data.batch import rows
from stageline.pipeline.errors import DataError, ModelRefused, describe_error, raised_by_user_code
from stageline.pipeline.stage.layers.layer import joined
from stageline.pipeline.tree import Leaf, Tree, describe, leaves, map_leaves, map_tensors, tensors


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
        sizes = (count // microbatches, -(-count // microbatches))
        wrong = [size for size in sizes if (size != 1 if self.one_row else size < 2)]
        if not wrong:
            return
        title = next(_title(path) for path, leaf in self._leaves.items() if isinstance(leaf, torch.Tensor))
        batch = "" if microbatches == 1 else f" ({_counted(count)} in {microbatches} microbatches)"
        raise DataError(
            f"{title} has {_counted(wrong[0])} in a microbatch{batch}, and the model was traced for microbatches of "
            f"{_ONE_ROW if self.one_row else _MORE_ROWS}"
        )


_ONE_ROW = (
    "1 row, since its example has 1. Give an example of 2 rows or more, or every batch as many rows as microbatches"
)
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


@dataclass(frozen=True, slots=True)
class Forward:
    """A model's forward in one mode.

    Attributes:
        graph: The traced graph. It returns the leaves of `output` that are `COMPUTED`.
        calls: Modules that are called, in order. `graph` has a marker for each, or an inner graph has it.
        state: Placeholders of parameters and buffers, with their names in the model.
        constants: Placeholders of constants, with their tensors.
        inputs: Placeholders of the inputs.
        output: The output, with `COMPUTED` for each leaf that differs from microbatch to microbatch.
    """

    graph: GraphModule
    calls: tuple[str, ...]
    state: Mapping[str, str]
    constants: Mapping[str, torch.Tensor]
    inputs: tuple[str, ...]
    output: Tree


COMPUTED: Any = object()  # stands for a leaf of the output that differs from microbatch to microbatch


def traced_forward(model: torch.nn.Module, example: Example, names: Sequence[str]) -> Forward:
    """Return the forward of `model`, its modules in their present modes, with markers before the calls of `names`.

    When the graph runs, the number of rows may be any from 2 on, unless the example has 1 row. All other shapes are
    those of the example.

    Args:
        model: The model.
        example: Inputs to trace with.
        names: Names of the modules whose calls are marked.

    Raises:
        ModelRefused: torch.export's reason, or the model's own if the example does not fit it.
    """
    called = _Called(model, example)
    shapes: dict[int, Any] = {} if example.one_row else {0: Dim("rows")}
    dynamic = ((shapes,) * len(example.tensors),)
    try:
        with _marked(model, names, called.record.calls), with_memory(model), torch.enable_grad(), _unsaid():
            program = torch.export.export(called, example.tensors, dynamic_shapes=dynamic, strict=False)
    except ModelRefused:
        raise
    except Exception as error:
        if not raised_by_user_code(error):
            raise
        raise _refused(called, error) from error
    return _forward(program, called.record)


class _Record:
    """The calls and the output of a forward that is traced."""

    def __init__(self) -> None:
        """Make an empty record."""
        self.calls: list[str] = []
        self.output: Tree = None

    def end(self, output: Tree) -> None:
        """Record the output, with `COMPUTED` in the place of each computed leaf."""
        self.output = map_leaves(lambda leaf: COMPUTED if isinstance(leaf, _COMPUTED) else leaf, output)


class _Called(torch.nn.Module):
    """A model as a function of the example's tensors, which returns the computed leaves of the model's output."""

    def __init__(self, model: torch.nn.Module, example: Example) -> None:
        super().__init__()
        self.model = model
        self.example = example
        self.record = _Record()

    def forward(self, *given: torch.Tensor) -> tuple[Any, ...]:
        """Call the model, record its output, and return the computed leaves."""
        self.record.calls.clear()  # torch.export may call more than once
        output = plain_output(self.example.call(self.model, given))
        self.record.end(output)
        return tuple(leaf for _, leaf in leaves(output) if isinstance(leaf, _COMPUTED))


_COMPUTED = (torch.Tensor, torch.SymInt, torch.SymFloat, torch.SymBool)


def plain_output(value: Any, path: str = "") -> Tree:
    """Return a model's output as a tree, with a dict for every mapping, such as transformers' outputs are.

    Args:
        value: The output, or a part of it.
        path: Path of the part in the output, for the error.

    Raises:
        ModelRefused: The output has an object other than tensors, None, numbers and texts.
    """
    if isinstance(value, Mapping):
        return {str(key): plain_output(each, joined(path, str(key))) for key, each in value.items()}
    if isinstance(value, tuple | list):
        kind = tuple if isinstance(value, tuple) else list
        return kind(plain_output(each, joined(path, str(place))) for place, each in enumerate(value))
    if value is None or isinstance(value, (*_COMPUTED, bool, int, float, str)):
        return value  # type: ignore[return-value]  # numbers of torch's become numbers
    raise ModelRefused(
        f"the model returns an object of {type(value).__name__}{f' as its {path}' if path else ''}; expected "
        f"tensors, None, numbers and texts, in tuples, lists and dicts. Let its forward return what the loss needs"
    )


def _forward(program: ExportedProgram, record: _Record) -> Forward:
    state: dict[str, str] = {}
    constants: dict[str, torch.Tensor] = {}
    inputs = []
    for each in program.graph_signature.input_specs:
        name, target = str(getattr(each.arg, "name", "")), each.target or ""
        if each.kind in (InputKind.PARAMETER, InputKind.BUFFER):
            state[name] = target.removeprefix("model.")
        elif each.kind is InputKind.USER_INPUT:
            inputs.append(name)
        elif isinstance(constant := program.constants.get(target), torch.Tensor):
            constants[name] = constant
        else:
            raise ModelRefused(f"the model's forward needs {target}, which is no tensor: torch.export keeps it apart")
    return Forward(program.graph_module, tuple(record.calls), state, constants, tuple(inputs), record.output)


@contextmanager
def _marked(model: torch.nn.Module, names: Sequence[str], calls: list[str]) -> Iterator[None]:
    """Add a marker to the traced graph, and the name to `calls`, at each call of the modules `names` in the context."""
    hooks = [model.get_submodule(name).register_forward_pre_hook(partial(_mark, calls, name)) for name in names]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _mark(calls: list[str], name: str, *_: object) -> None:
    calls.append(name)
    pipe_split()  # type: ignore[no-untyped-call]


@contextmanager
def with_memory(model: torch.nn.Module) -> Iterator[None]:
    """Put parameters and buffers that are on the meta device on the CPU in the context.

    They are not written to, so the system gives them no memory.
    """
    tables: list[dict[str, Any]] = [
        table for module in model.modules() for table in (module._parameters, module._buffers)
    ]
    former = [(table, key, tensor) for table in tables for key, tensor in table.items() if tensor is not None]
    unallocated = {id(tensor): tensor for _, _, tensor in former if tensor.is_meta}
    made = {number: _on_cpu(tensor) for number, tensor in unallocated.items()}
    try:
        for table, key, tensor in former:
            table[key] = made.get(id(tensor), tensor)
        yield
    finally:
        for table, key, tensor in former:
            if id(tensor) in made:
                table[key] = tensor


def _on_cpu(tensor: torch.Tensor) -> torch.Tensor:
    made = torch.empty_like(tensor, device="cpu")
    return torch.nn.Parameter(made, tensor.requires_grad) if isinstance(tensor, torch.nn.Parameter) else made


def does_not_fit(model: torch.nn.Module, own: str) -> ModelRefused:
    """Return the error for an example with which `model` itself raises the error text `own`."""
    return ModelRefused(
        f"the example that the model is traced with does not fit: the {type(model).__name__}, called with it, raises "
        f"{own.rstrip('.')}. Give what a batch's inputs are"
    )


def _refused(called: _Called, error: Exception) -> ModelRefused:
    name = type(called.model).__name__
    if own := _own_error(called):
        return does_not_fit(called.model, own)
    text = describe_error(error)
    reason = " ".join(text.split("\n\n")[0].split()).rstrip(".")
    if "Constraints violated (rows)" in text:
        reason = f"its forward decides by the number of rows, or needs one: {reason.partition('Suggested fixes: ')[2]}"
    return ModelRefused(
        f"torch.export cannot trace the {name}: {reason}. Change its forward, or list its layers yourself: "
        f" stageline.Layers (docs/guides/models.md)"
    )


def _own_error(called: _Called) -> str:
    """Return the first line of what the model raises for the example, untraced; "" if it raises nothing.

    Also "" if the model's parameters have no memory. The buffers are as before.
    """
    state = [*called.named_parameters(), *called.named_buffers()]
    if any(tensor.is_meta for _, tensor in state):
        return ""
    buffers = {name: buffer.clone() for name, buffer in called.named_buffers()}
    try:
        torch.func.functional_call(called, buffers, called.example.tensors)
    except Exception as error:
        if not raised_by_user_code(error):
            raise
        return describe_error(error).splitlines()[0]
    return ""


_LOGGERS = ("torch._subclasses.fake_tensor", "torch.fx.experimental.symbolic_shapes")


@contextmanager
def _unsaid() -> Iterator[None]:
    """Keep torch.export, in the context, from printing an error that it raises too.

    Before it raises, torch.export prints the error, after the graph found so far, on stderr and in its log.
    """
    loggers = [(logger, logger.disabled) for logger in map(logging.getLogger, _LOGGERS)]
    try:
        for logger, _ in loggers:
            logger.disabled = True
        with redirect_stderr(StringIO()) as said:
            yield
        sys.stderr.write(said.getvalue())
    finally:
        for logger, disabled in loggers:
            logger.disabled = disabled
