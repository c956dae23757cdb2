"""Traces of a model's forward by torch.export: a graph of torch's operators, with a marker before each module's call.

    marker                        here begins the call of conv1
    x1 = conv2d(x, conv1_weight)
    marker                        here begins the call of bn1
    x2 = batch_norm(x1, ...)

The markers are those of torch.distributed.pipelining; a forward pre-hook of all modules puts them there.
"""

import logging
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, suppress
from dataclasses import dataclass
from functools import partial
from io import StringIO
from typing import Any

import torch
from torch.distributed.pipelining import pipe_split
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind
from torch.fx import GraphModule
from torch.nn.modules.module import register_module_forward_pre_hook

from stageline.pipeline.errors import ModelRefused, raised_by_user_code
from stageline.pipeline.tree import Tree, leaves, map_leaves

from .as_in_eager import as_in_eager, len_left_open
from .example import Example
from .output import COMPUTED, COMPUTED_KINDS, plain_output
from .refusal import does_not_fit, own_error, refused


@dataclass(frozen=True, slots=True)
class Forward:
    """A model's forward in one mode.

    Attributes:
        graph: The traced graph. It returns the leaves of `output` that are `COMPUTED`.
        calls: Calls of modules, in order: the first one has the module's name, the second one `name@2`. `graph` has a
            marker for each, or an inner graph has it.
        state: Placeholders of parameters and buffers, with their names in the model.
        constants: Placeholders of constants, with their tensors.
        inputs: Placeholders of the inputs.
        output: The output, with `COMPUTED` for each leaf that differs from microbatch to microbatch.
        example: The example, with the sizes that the graph is for.
    """

    graph: GraphModule
    calls: tuple[str, ...]
    state: Mapping[str, str]
    constants: Mapping[str, torch.Tensor]
    inputs: tuple[str, ...]
    output: Tree
    example: Example


def traced_forward(model: torch.nn.Module, example: Example, names: Sequence[str], *, trains: bool) -> Forward:
    """Return the forward of `model`, its modules in their present modes, with markers before the calls of `names`.

    Args:
        model: The model.
        example: Inputs to trace with, and the sizes that the graph shall be for, if the forward lets it.
        names: Names of the modules whose calls are marked.
        trains: True for a graph that has gradients. Otherwise torch may have ways to compute that have none.

    Raises:
        ModelRefused: torch.export's reason, or the model's own if the example does not fit it.
    """
    forward = _traced_forward(model, example, names, trains=trains)
    if forward.example.rows.is_one and not example.rows.is_one:
        with suppress(ModelRefused), len_left_open(model):
            other = _traced_forward(model, example, names, trains=trains)
            return forward if other.example.rows.is_one else other
    return forward


def _traced_forward(model: torch.nn.Module, example: Example, names: Sequence[str], *, trains: bool) -> Forward:
    called = _Called(model, example)
    try:
        with _marked(model, names, called.record.calls), with_memory(model), _unsaid(), torch.set_grad_enabled(trains):
            program = torch.export.export(called, example.tensors, dynamic_shapes=(example.free,), strict=False)
    except ModelRefused:
        raise
    except Exception as error:
        if not raised_by_user_code(error):
            raise
        own = own_error(called, example.tensors)
        raise (does_not_fit(model, example.inputs, own) if own else refused(model, error)) from error
    return _forward(program, called.record, example)


class _Record:
    """The calls and the output of a forward that is traced."""

    def __init__(self) -> None:
        """Make an empty record."""
        self.calls: list[str] = []
        self.output: Tree = None

    def end(self, output: Tree) -> None:
        """Record the output, with `COMPUTED` in the place of each computed leaf."""
        self.output = map_leaves(lambda leaf: COMPUTED if isinstance(leaf, COMPUTED_KINDS) else leaf, output)


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
        with as_in_eager():
            output = plain_output(self.example.call(self.model, given))
        self.record.end(output)
        return tuple(leaf for _, leaf in leaves(output) if isinstance(leaf, COMPUTED_KINDS))


def _forward(program: ExportedProgram, record: _Record, example: Example) -> Forward:
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
    values = {node.name: node.meta.get("val") for node in program.graph.nodes if node.op == "placeholder"}
    narrowed = example.narrowed([values[name] for name in inputs])
    return Forward(program.graph_module, tuple(record.calls), state, constants, tuple(inputs), record.output, narrowed)


def called_module(call: str) -> str:
    """Return the name of the module of a call: `block` for its third call, which is named `block@3`."""
    return call.partition("@")[0]


def number_of_call(call: str) -> int:
    """Return the number of a call among those of its module, from 1."""
    return int(call.partition("@")[2] or 1)


@contextmanager
def _marked(model: torch.nn.Module, names: Sequence[str], calls: list[str]) -> Iterator[None]:
    """Add a marker to the traced graph, and the name to `calls`, at each call of the modules `names` in the context.

    The marker comes before what the module's own forward pre-hooks compute, such as the weight of a pruned module.
    """
    modules = [(name, model.get_submodule(name)) for name in names]
    hook = register_module_forward_pre_hook(partial(_mark, calls, modules))  # a hook of its own would slow a module
    try:
        yield
    finally:
        hook.remove()


def _mark(calls: list[str], modules: Sequence[tuple[str, torch.nn.Module]], called: torch.nn.Module, _: object) -> None:
    for name, module in modules:
        if vars(module) is vars(called):  # torch.export calls a stand-in where a module has several names
            times = 1 + sum(called_module(call) == name for call in calls)
            calls.append(name if times == 1 else f"{name}@{times}")
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


_OF_RNNS = r"The tensor attributes? (self\.[\w.]+\._flat_weights\[\d+\](, )?)+ w"  # which nn.LSTM sets again itself
_LOGGERS = ("torch._subclasses.fake_tensor", "torch.fx.experimental.symbolic_shapes")


@contextmanager
def _unsaid() -> Iterator[None]:
    """Keep torch.export, in the context, from printing an error that it raises too, and from warning of torch's RNNs.

    Before it raises, torch.export prints the error, after the graph found so far, on stderr and in its log.
    """
    loggers = [(logger, logger.disabled) for logger in map(logging.getLogger, _LOGGERS)]
    try:
        for logger, _ in loggers:
            logger.disabled = True
        with redirect_stderr(StringIO()) as said, warnings.catch_warnings():
            warnings.filterwarnings("ignore", _OF_RNNS)
            yield
        sys.stderr.write(said.getvalue())
    finally:
        for logger, disabled in loggers:
            logger.disabled = disabled
