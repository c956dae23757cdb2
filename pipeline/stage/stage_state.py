"""The state of a stage as a value: everything needed to continue later, elsewhere, with the same bits.

Random number generators are not part of it: they are seeded before each layer of each microbatch.
`NamedTensors` has the tensors themselves, by the unsplit model's names.
"""

from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from stageline.pipeline.errors import StageError
from stageline.pipeline.features.versions import InFlight, Previous
from stageline.pipeline.stage.layers.body import Body, Weights
from stageline.pipeline.stage.layers.memory import copied, is_split, split_like, whole
from stageline.pipeline.tree import Tree, describe

from .stage_update import StageUpdate, require_same_settings

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
        averages=on_host(dict(update.average.entries), copy),
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
    update.average.restore(state.averages)


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


class NamedTensors:
    """Those of stage number `index`: of its `body`, which `update` changes."""

    def __init__(self, index: int, body: Body, update: StageUpdate) -> None:
        self.index = index
        self._body = body
        self._update = update

    @property
    def optimizer(self) -> torch.optim.Optimizer | None:
        """None without trainable parameters."""
        return self._update.optimizer

    @property
    def lr_scheduler(self) -> torch.optim.lr_scheduler.LRScheduler | None:
        """None without an optimizer."""
        return self._update.lr_scheduler

    @property
    def learning_rates(self) -> tuple[float, ...]:
        """Those of the optimizer's groups, for the next update; none without an optimizer."""
        groups = () if self.optimizer is None else self.optimizer.param_groups
        return tuple(float(group["lr"]) for group in groups if "lr" in group)

    def gradients(self) -> dict[str, torch.Tensor | None]:
        """The gradients added up since the last update, by the unsplit model's names; None for one that got none. They
        are the stage's own: nothing writes to them once `set_gradients` has been called."""
        return {name: each.grad for name, each in self._trained()}

    def set_gradients(self, gradients: Mapping[str, torch.Tensor | None]) -> None:
        """What the next update updates with."""
        for name, parameter in self._trained():
            parameter.grad = gradients[name]

    def state_dict(self, *, ema: bool = False) -> dict[str, torch.Tensor]:
        """Parameters and buffers by the unsplit model's names, with `ema` the averages in place of weights. The tensors
        are the stage's own, not copies. Raises `StageError` for averages on a stage that has none, and `ModelRefused`
        for a tensor that a forward has registered, or taken out."""
        self._body.demand_as_made()
        averages = self._update.average.demanded().entries if ema else {}
        return {name: whole(tensor) for name, tensor in {**self._body.weights(), **averages}.items()}

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Loads what `state_dict` returns; averages stay, and the next update goes on from them. Raises torch's
        `RuntimeError`, which names what is missing or misshapen, and `StageError` for a stage of several processes."""
        if any(map(is_split, self._body.parameters())):
            raise StageError(f"stage {self.index} is computed by a group: its weights are set by a checkpoint only")
        self._body.set_weights(state)

    @property
    def averages(self) -> Weights:
        """Of the trained parameters, by their names in `state_dict`; nothing before the first update, when they are the
        weights, and nothing without `ema_decay`."""
        return self._update.average.entries

    def parameters(self) -> dict[str, torch.Tensor]:
        """Return the parameters by the unsplit model's names. The tensors are the stage's own, not copies."""
        return self._body.unsplit_parameters()

    def variables(self) -> dict[str, torch.Tensor]:
        """Parameters and buffers, with those that `state_dict` leaves out, by the unsplit model's names. The tensors
        are the stage's own, not copies."""
        return {**self._body.unsplit_buffers(), **self._body.weights()}

    def buffers(self) -> Weights:
        """Copies of the layers' buffers, by the unsplit model's names."""
        return {name: copied(buffer) for name, buffer in self._body.unsplit_buffers().items()}

    def set_buffers(self, buffers: Weights) -> None:
        """Restores what `buffers` returned. Does not write to unchanged buffers, since a graph may hold them."""
        now = self._body.unsplit_buffers()
        changed = (name for name, kept in buffers.items() if name not in now or not torch.equal(kept, now[name]))
        self._body.set_buffers({name: buffers[name] for name in changed})

    def _trained(self) -> list[tuple[str, torch.Tensor]]:
        return [(name, each) for name, each in self._body.unsplit_parameters().items() if each.requires_grad]
