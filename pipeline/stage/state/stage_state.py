"""The state of a stage as a value: everything needed to continue later, elsewhere, with the same bits.

Random number generators are not part of it: they are seeded before each layer of each microbatch.
"""

from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from stageline.pipeline.stage.layers.body import Body, Weights
from stageline.pipeline.stage.layers.memory import copied, split_like, whole
from stageline.pipeline.stage.state.versions import InFlight, Previous
from stageline.pipeline.stage.update.optimizer import require_same_settings
from stageline.pipeline.stage.update.update import StageUpdate
from stageline.pipeline.tree import Tree, describe

Copy = Callable[[Tensor], Tensor]  # as `copied` does
Settings = dict[str, Any]  # what a `state_dict()` of torch.optim gives


@dataclass(frozen=True, slots=True)
class StageState:
    """What `Stage.snapshot` returns and `Stage.restore` takes. Tensors are on the CPU, by the unsplit model's names.

    `weights` is the stage's `state_dict()`; `buffers` are the buffers that it leaves out (`persistent=False`).
    `averages` are those of trained parameters, where they are averaged and were updated, by the names in `weights`.
    `gradients` are gradients that no update has cleared; torch's optimizers leave none between two steps.
    `parameters` are the names of those that `optimizer` has by number: by these, other stages can go on from the state.
    `in_flight` is in the order of the forwards, and empty in synchronous mode. `previous` is what the microbatches of
    the next step read where weights are delayed; None elsewhere, and before the first update. `features` is what
    features of the user keep of the stage, by their names.
    """

    weights: Weights
    buffers: Weights = field(default_factory=dict)
    gradients: Weights = field(default_factory=dict)
    optimizer: Settings | None = None
    parameters: tuple[str, ...] = ()
    lr_scheduler: Settings | None = None
    in_flight: tuple[InFlight, ...] = ()
    averages: Weights = field(default_factory=dict)
    previous: Previous | None = None
    features: Mapping[str, Tree] = field(default_factory=dict)


def capture_state(
    body: Body,
    update: StageUpdate,
    in_flight: tuple[InFlight, ...],
    previous: Previous | None = None,
    features: Mapping[str, Tree] = MappingProxyType({}),
    copy: Copy = copied,
) -> StageState:
    """Copies the state of a stage with these parts, each tensor by `copy`. Raises `ModelRefused` for a tensor that a
    forward has registered, or taken out."""
    body.demand_as_made()
    weights, optimizer, lr_scheduler = body.weights(), update.optimizer, update.lr_scheduler
    gradients = {name: p.grad for name, p in body.named_parameters() if p.grad is not None}
    return StageState(
        weights=on_host(weights, copy),
        buffers=on_host({name: buffer for name, buffer in body.unsplit_buffers().items() if name not in weights}, copy),
        gradients=on_host(body.by_unsplit_names(gradients), copy),
        optimizer=None if optimizer is None else on_host(optimizer.state_dict(), copy),
        parameters=() if optimizer is None else _numbered(body, optimizer),
        lr_scheduler=None if lr_scheduler is None else on_host(lr_scheduler.state_dict()),
        in_flight=in_flight,
        averages=on_host({} if update.average is None else update.average.entries, copy),
        previous=previous,
        features=on_host(dict(features), copy),
    )


def restore_state(state: StageState, body: Body, update: StageUpdate) -> None:
    """Restores `state`, but for what is in flight, in parts like those that it was captured from.

    Raises `RuntimeError`, `ValueError` or `KeyError`, some from torch, if the parts do not match.
    """
    body.set_buffers({**state.weights, **state.buffers})
    mine = body.weights()
    _require_same_form(state.weights, mine)
    body.set_weights({name: split_like(mine[name], weight) for name, weight in state.weights.items()})
    gradients = body.by_own_names(state.gradients)
    for name, parameter in body.named_parameters():
        own = split_like(parameter, gradients[name]) if name in gradients else None
        parameter.grad = None if own is None else own.to(parameter.device, copy=True)
    if update.optimizer is not None and state.optimizer is not None:
        scheduled = update.lr_scheduler is not None
        require_same_settings(update.optimizer, state.optimizer["param_groups"], scheduled=scheduled)
    _restore(update.optimizer, state.optimizer, "an optimizer", update.copied_state)
    _restore(update.lr_scheduler, state.lr_scheduler, "a learning rate scheduler", copied)
    if update.average is not None:
        update.average.restore(state.averages)
    elif state.averages:
        raise ValueError("averages of weights are in the state only")


def on_host(value: Any, copy: Copy = copied) -> Any:
    """A copy of `value`, with its tensors whole, on the CPU: of tensors, and of dicts, Counters, lists, tuples of them.

    Anything else is not copied.
    """
    match value:
        case Tensor():
            plain = whole(value.detach())
            return copy(plain) if plain.is_cpu else plain.cpu()
        case Counter():
            return Counter(value)
        case OrderedDict():
            return OrderedDict((key, on_host(each, copy)) for key, each in value.items())
        case dict():
            return {key: on_host(each, copy) for key, each in value.items()}
        case list():
            return [on_host(each, copy) for each in value]
        case tuple() if type(value) is tuple:
            return tuple(on_host(each, copy) for each in value)
        case _:
            return value


def _numbered(body: Body, optimizer: Optimizer) -> tuple[str, ...]:
    """The names of the optimizer's parameters, in the order by which its `state_dict` numbers them; "" for one that is
    not the stage's."""
    own = body.by_unsplit_names(dict(body.named_parameters()))
    names = {id(parameter): name for name, parameter in own.items()}
    return tuple(names.get(id(each), "") for group in optimizer.param_groups for each in group["params"])


def _require_same_form(saved: Weights, mine: Weights) -> None:
    """Raises `ValueError` unless both have the same names, shapes and dtypes; copying would cast."""
    if odd := sorted(saved.keys() ^ mine.keys()):
        here, there = ("in the state", "not in the stage") if odd[0] in saved else ("in the stage", "not in the state")
        raise ValueError(f"{odd[0]} is {here} and {there}")
    for name, tensor in saved.items():
        if (tensor.shape, tensor.dtype) != (mine[name].shape, mine[name].dtype):
            raise ValueError(f"{name} is {describe(tensor)} in the state and {describe(mine[name])} in the stage")


def _restore(part: Optimizer | LRScheduler | None, saved: Settings | None, kind: str, copy: Copy) -> None:
    if (part is None) != (saved is None):
        raise ValueError(f"{kind} is {'in the stage' if saved is None else 'in the state'} only")
    if part is None or saved is None:
        return
    own = on_host(saved, copy)
    part.load_state_dict(own)
    if isinstance(part, Optimizer):
        _undo_casts(part, own)


def _undo_casts(optimizer: Optimizer, saved: Settings) -> None:
    """Restores the tensors that `load_state_dict` rounds: those of another dtype than their parameter. Those of a split
    parameter are split as it is."""
    numbers = [number for group in saved["param_groups"] for number in group["params"]]
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for number, parameter in zip(numbers, parameters, strict=True):
        if number in saved["state"]:
            optimizer.state[parameter] = _placed(saved["state"][number], optimizer.state[parameter], parameter)


def _placed(saved: Any, loaded: Any, parameter: Tensor) -> Any:
    """`saved` with each tensor on the device of its counterpart in `loaded`, and split as `parameter` is."""
    match saved, loaded:
        case Tensor(), Tensor():
            return split_like(parameter, saved.to(loaded.device))
        case dict(), Mapping():
            return {key: _placed(each, loaded[key], parameter) for key, each in saved.items()}
        case (list(), list()) | (tuple(), tuple()):
            return type(saved)(_placed(each, other, parameter) for each, other in zip(saved, loaded, strict=True))
        case _:
            return saved
