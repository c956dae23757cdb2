"""Checks of a script's arguments, batches and broker address, before anything is started.

An argument of another kind would fail in a place that does not name it, and a worker that fails for a batch ends the
run. Ranges of values, and how they go together, are checked by the plan. Objects of a plan are refused where they are
loaded, in the worker's process; a script's are checked in the script.
"""

import socket
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Any

import torch

from stageline.pipeline.addresses import EVERY_INTERFACE, Reach, broker_schemes, fault, host_of, masked, transport_of
from stageline.pipeline.data import Batch, rows
from stageline.pipeline.errors import DataError, ModelRefused
from stageline.pipeline.stage.layers.loss import demand_mean
from stageline.pipeline.tree import Tree, leaves, tensors

from .arguments import ARGUMENTS, MEASURE, LineCall, LineOptions

_PLAIN = (bool, int, float, str, type(None))
_TREE = "a tensor whose dimension 0 counts the rows, or such tensors and plain values in tuples, lists and dicts"
TARGETS = "labels"  # the key of the targets in a batch that is a dict, by default as in transformers
_SETTING = '{"recovery.lease": "30s"}'


def _misfits(options: LineCall) -> Iterator[str]:
    """Yield a message for each value of a wrong kind: the argument, its value, and the expected kind."""
    settings: object = options.settings or {}  # whose values may hold a password
    if not isinstance(settings, Mapping):
        yield f"settings is {_of_type(settings)}: expected a dict of a plan's keys, such as {_SETTING}"
        return
    for each in fields(LineCall):
        name, value, kind = each.name, getattr(options, each.name), ARGUMENTS[each.name].kind
        if kind is not None and value is not each.default and not kind.has(value):
            called = f" is {_of_type(value)}, which cannot be called;" if kind.has is callable else ":"
            yield f"{name} = {short(value)}{called} expected {kind.wanted}"
    for key, value in settings.items():
        if not isinstance(key, str):
            yield f"settings: the key {short(key)} is {_of_type(key)}: expected a plan's keys, such as {_SETTING}"
        if isinstance(value, Mapping):
            yield f"settings[{key!r}] is {_of_type(value)}: expected single keys, such as {_SETTING}"


def short(value: object) -> str:
    """Return `repr(value)` in at most 60 characters, or a function's name."""
    text = getattr(value, "__qualname__", None) or " ".join(repr(value).split())
    return text if len(text) <= 60 else f"{text[:57]}..."


def _of_type(value: object) -> str:
    """Return the type of `value` as text, such as "of type int"."""
    return f"of type {type(value).__name__}"


def demand_usable(call: LineCall) -> None:
    """Raise `ModelRefused` for the first unusable argument; the error names it, its value and the expected values."""
    if wrong := next(_complaints(call), None):
        raise ModelRefused(wrong)
    demand_default_device()


def demand_default_device() -> None:
    """Raise `ModelRefused` if the script has changed torch's default device.

    The memory for messages between stages would be made there too.
    """
    if (device := torch.get_default_device()).type != "cpu":
        raise ModelRefused(
            f"the script has changed torch's default device to {device} (torch.set_default_device, or a "
            f"with torch.device(...) around this call), where messages between stages cannot be received. Call "
            f'torch.set_default_device("cpu"), or leave that block, before the Line is made and called; its stages '
            f'compute where its argument device says, such as device="cuda"'
        )


def _complaints(options: LineCall) -> Iterator[str]:
    yield from _misfits(options)
    if options.cut is not None and options.stages is not None:
        yield (
            f"cut = {options.cut!r} and stages = {options.stages!r} are two ways to say the same: cut names the layers "
            "that stages 1, 2, ... begin with, stages is their number. Leave out one"
        )
    for name, row in ARGUMENTS.items():
        if row.alone and row.key in options.other_keys:
            yield f'settings["{row.key}"]: the script needs it too. Pass {name} = ... instead'
    yield from _of_measure("loss", options.loss)
    demand_mean(options.loss)
    metrics: Sequence[object] = options.metrics
    for index, metric in enumerate(metrics):
        yield from _of_measure(f"metrics[{index}]", metric)
    for device in dict.fromkeys(map(str, options.devices)):
        if reason := _device_complaint(device):
            yield f'device = "{device}": {reason}; expected one that this torch has, such as "cpu" or "cuda:0"'
    url = str(options.other_keys.get("queues.url", ""))
    if options.workers != "inline" and transport_of(url).reach is Reach.PROCESS:
        yield (
            f'settings["queues.url"] = "{url}": queues in memory do not reach from one process to another. Leave '
            'it out, or pass workers="inline" to compute in this process'
        )


def _of_measure(argument: str, given: object) -> Iterator[str]:
    """Yield why `given`, the value of `argument`, is no function of (outputs, targets)."""
    if isinstance(given, type) and issubclass(given, torch.nn.Module):
        yield f"{argument} = {short(given)} is a class; expected {MEASURE}, such as an object of it: {short(given)}()"
    elif not callable(given):
        yield f"{argument} = {short(given)} is {_of_type(given)}, which cannot be called; expected {MEASURE}"


def _device_complaint(name: str) -> str:
    """Return why torch cannot use the device `name`, "" if it can.

    No GPU is started: forks could not use it any more.
    """
    try:
        device = torch.device(name)
    except RuntimeError:
        return "torch knows no such device"
    match device.type:
        case "meta":
            return "its tensors have no values"
        case "cuda" if not torch.backends.cuda.is_built():  # type: ignore[no-untyped-call]
            return f"torch {torch.__version__} was built without CUDA"
        case "mps" if not torch.backends.mps.is_built():
            return f"torch {torch.__version__} was built without MPS"
        case "xpu" if not torch.xpu._is_compiled():
            return f"torch {torch.__version__} was built without XPU"
    return ""


def outside_fit(options: LineOptions) -> str:
    """Return why a line with these arguments cannot do a step that is not one of a `fit`; "" if it can."""
    if options.follows("epoch"):
        return (
            'lr_every = "epoch": step alone does not know where an epoch ends. Train with fit, whose batches have a '
            "len(), or make the line with the number of steps in an epoch, such as lr_every=len(loader)"
        )
    if options.follows("evaluation"):
        return (
            'lr_every = "evaluation": step alone does not evaluate. Train with fit, held_out= and evaluate_every=, '
            "or make the line with a scheduler that needs no value, and a number of steps"
        )
    return ""


def demand_batch(x: Tree, y: Tree) -> None:
    """Raise `DataError` if `x` or `y` is no batch, or if they have no common number of rows."""
    of_x, of_y = demand_rows(x, "x", "input"), demand_rows(y, "y", "target")
    if of_x != of_y:
        raise DataError(f"x has {of_x} rows and y has {of_y}: no common number of rows. Dimension 0 counts them")


def demand_rows(tree: Tree, name: str = "x", what: str = "input") -> int:
    """Return the number of rows of `tree`.

    Args:
        tree: Inputs or targets of a batch.
        name: Name of the argument.
        what: Word for it.

    Raises:
        DataError: `tree` has no tensor, tensors of different numbers of rows, or an object that no message can have.
    """
    if foreign := next(_foreign(tree, name), None):
        raise DataError(f"{foreign}; expected {_TREE}")
    if not tensors(tree):
        lists = " without a tensor (pass torch.as_tensor(...) of numbers)" if leaves(tree) and tree is not None else ""
        raise DataError(f"there is no {what}: {name} is {_kind(tree)}{lists}; expected {_TREE}")
    return rows(tree)


def _foreign(tree: Any, path: str) -> Iterator[str]:
    """Yield each part of `tree`, which is called `path`, that has no place in a batch, as text."""
    kind = type(tree)
    if kind is tuple or kind is list:
        for place, each in enumerate(tree):
            yield from _foreign(each, f"{path}[{place}]")
    elif kind is dict:
        for key, each in tree.items():
            yield from _foreign(each, f"{path}[{key!r}]")
    elif isinstance(tree, torch.Tensor):
        if tree.is_nested:
            yield f"{path} is a nested tensor (pass torch.nested.to_padded_tensor(..., 0) of it)"
    elif kind not in _PLAIN:
        yield f"{path} is {_kind(tree)}{_way_out_of(tree)}"


def _way_out_of(value: object) -> str:
    if isinstance(value, Mapping | tuple):
        return f" (pass {'dict' if isinstance(value, Mapping) else 'tuple'}(...) of it)"
    return " (pass torch.as_tensor(...) of it)" if hasattr(value, "__array__") else ""


def batches_of(batches: Iterable[Any], taker: str = "evaluate", targets: str = TARGETS) -> Iterator[Batch]:
    """Yield the batches that the method `taker` was given as (inputs, targets), and check each one.

    Args:
        batches: Pairs, or dicts: then the inputs are the dict without its targets.
        taker: Name of the method.
        targets: Key of the targets in a dict.

    Raises:
        DataError: `batches` is no iterable of pairs or of dicts with this key.
    """
    given: Any = batches
    if not isinstance(given, Iterable):
        of_dataset = ". Give stageline.Loader(dataset, batch_size=32, seed=0), or a torch DataLoader"
        raise _no_batches(
            taker,
            f"it got {'None' if given is None else f'an object {_of_type(given)}'}",
            of_dataset if hasattr(given, "__getitem__") else "",
        )
    for number, batch in enumerate(given):
        if isinstance(batch, Mapping):
            yield _divided(batch, taker, number, targets)
        elif isinstance(batch, tuple | list) and len(batch) == 2:
            yield batch[0], batch[1]
        else:
            raise _no_batches(taker, f"batch {number} is {_kind(batch)}", _way_out_of_batch(batch))


def _divided(batch: Mapping[str, Tree], taker: str, number: int, targets: str) -> Batch:
    inputs = {name: each for name, each in batch.items() if name != targets}
    if targets in batch and inputs:
        return inputs, batch[targets]
    found = ", ".join(map(str, batch)) or "no keys"
    raise DataError(
        f'{taker}: batch {number} is a dict with {found}, and targets = "{targets}" is the key of its targets, beside '
        f'those of its inputs. Name the key, such as {taker}(batches, targets="label"), or bring (inputs, targets)'
    )


def _way_out_of_batch(batch: object) -> str:
    if isinstance(batch, tuple | list) and len(batch) > 2:
        return ". Several inputs are a tuple: bring ((x1, x2), y)"
    return ". For one batch write [(x, y)]"


def _no_batches(taker: str, got: str, way_out: str) -> DataError:
    return DataError(f"{taker} takes an iterable of (x, y) batches, and {got}{way_out}")


def _kind(value: object) -> str:
    if value is None:
        return "None"
    size = f" with {len(value)} entries" if isinstance(value, tuple | list) else ""
    return f"{_of_type(value)}{size}"


def check_address(broker: str) -> None:
    """Raise `ValueError` for an address that a worker on another machine cannot dial."""
    found = fault(broker, broker_schemes()) if transport_of(broker).reach is Reach.NETWORK else ""
    if found is None and transport_of(broker).has_free_port(broker):
        found = "the port must be one that the other machines can be told"
    if found is None and (host := host_of(broker)) and not _is_own(host):
        raise ValueError(
            f"broker = {broker!r}: this machine has no address {host}, and the broker listens on it. Write "
            f"tcp://0.0.0.0:{broker.rpartition(':')[2]} to listen at all that it has"
        )
    if found is not None:
        raise ValueError(
            f"broker = {masked(broker)!r} is not an address that workers on other machines can reach: "
            f"{found or 'it is of another kind'}. Write tcp://0.0.0.0:7000 to listen there, redis://host:6379/0, or "
            "the address that `stageline relay` prints"
        )


def _is_own(host: str) -> bool:
    """Return True if a process on this machine can listen at `host`."""
    if host in EVERY_INTERFACE:
        return True
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host.strip("[]"), 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as tried:
            tried.bind(address)
    except OSError:
        return False
    return True


def queues_beside(broker: str) -> str:
    """Return the address of the script's own queues: the broker's server or relay, or another port of its interface."""
    return broker.partition("#")[0] if transport_of(broker).is_shared else f"{broker.rpartition(':')[0]}:0"
