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
    """The state of a stage, as `Stage.snapshot` returns and `Stage.restore` takes it.

    Tensors are on the CPU, by the unsplit model's names.

    Attributes:
        weights: The stage's `state_dict()`.
        buffers: Buffers that `state_dict()` leaves out (`persistent=False`).
        gradients: Gradients that no update has cleared. Torch's optimizers leave none between two steps.
        optimizer: The optimizer's `state_dict()`; None without an optimizer.
        parameters: Names of the parameters that `optimizer` has by number. By these, other stages can continue from the
            state.
        lr_scheduler: The learning rate scheduler's `state_dict()`; None without a scheduler.
        in_flight: Microbatches in flight, in the order of their forwards; empty in synchronous mode.
        averages: Averages of trained parameters by the names in `weights`; empty before the first update, and where
            nothing is averaged.
        previous: Weights that the microbatches of the next step read where weights are delayed; None elsewhere, and
            before the first update.
        features: State that features of the user keep of the stage, by the features' names.
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
    """Return a copy of the state of the stage with these parts.

    Args:
        body: The stage's layers.
        update: The stage's optimizer, scheduler and averages.
        in_flight: Microbatches in flight.
        previous: Weights before the newest update, where weights are delayed.
        features: State that features of the user keep of the stage, by name.
        copy: Copies a tensor.

    Raises:
        ModelRefused: A forward has registered a parameter or buffer, or taken one out.
    """
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
    """Restore `state`, except microbatches in flight, in parts like those that it was captured from.

    Args:
        state: The state.
        body: The stage's layers.
        update: The stage's optimizer, scheduler and averages.

    Raises:
        RuntimeError, ValueError, KeyError: The parts do not match the state. Some of these come from torch.
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
    """Return a copy of `value` on the CPU, with its tensors whole.

    Tensors are copied, by `copy` if they are on the CPU, and dicts, Counters, lists and tuples of tensors. Anything
    else is returned as it is.
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
    """Return the names of the optimizer's parameters, in the order by which its `state_dict` numbers them.

    The name is "" for a parameter that is not the stage's.
    """
    own = body.by_unsplit_names(dict(body.named_parameters()))
    names = {id(parameter): name for name, parameter in own.items()}
    return tuple(names.get(id(each), "") for group in optimizer.param_groups for each in group["params"])


def _require_same_form(saved: Weights, mine: Weights) -> None:
    """Raise `ValueError` unless both have the same names, shapes and dtypes; copying would cast."""
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
    """Restore the tensors that `load_state_dict` rounds: those of another dtype than their parameter.

    Tensors of a split parameter are split as the parameter is.
    """
    numbers = [number for group in saved["param_groups"] for number in group["params"]]
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for number, parameter in zip(numbers, parameters, strict=True):
        if number in saved["state"]:
            optimizer.state[parameter] = _placed(saved["state"][number], optimizer.state[parameter], parameter)


def _placed(saved: Any, loaded: Any, parameter: Tensor) -> Any:
    """Return `saved` with each tensor on the device of its counterpart in `loaded`, split as `parameter` is."""
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
    """The tensors of one stage, by the unsplit model's names."""

    def __init__(self, index: int, body: Body, update: StageUpdate) -> None:
        """Take the parts of a stage.

        Args:
            index: Number of the stage, from 0.
            body: The stage's layers.
            update: Changes them at the end of a step: optimizer, scheduler and averages.
        """
        self.index = index
        self._body = body
        self._update = update

    @property
    def optimizer(self) -> torch.optim.Optimizer | None:
        """The optimizer; None without trainable parameters."""
        return self._update.optimizer

    @property
    def lr_scheduler(self) -> torch.optim.lr_scheduler.LRScheduler | None:
        """The learning rate scheduler; None without one, or without an optimizer."""
        return self._update.lr_scheduler

    @property
    def learning_rates(self) -> tuple[float, ...]:
        """The learning rates of the optimizer's groups for the next update; empty without an optimizer."""
        groups = () if self.optimizer is None else self.optimizer.param_groups
        return tuple(float(group["lr"]) for group in groups if "lr" in group)

    def gradients(self) -> dict[str, torch.Tensor | None]:
        """Return the gradients since the last update, by the unsplit model's names; None for one without.

        They are the stage's own: nothing writes to them once `set_gradients` has been called.
        """
        return {name: each.grad for name, each in self._trained()}

    def set_gradients(self, gradients: Mapping[str, torch.Tensor | None]) -> None:
        """Set the gradients that the next update uses, by the unsplit model's names.

        Raises `KeyError` if a trained parameter is missing.
        """
        for name, parameter in self._trained():
            parameter.grad = gradients[name]

    def state_dict(self, *, ema: bool = False) -> dict[str, torch.Tensor]:
        """Return parameters and buffers by the unsplit model's names, with `ema` the averages in place of weights.

        The tensors are the stage's own, not copies.

        Raises:
            StageError: `ema` is set, and the stage keeps no averages.
            ModelRefused: A forward has registered a parameter or buffer, or taken one out.
        """
        self._body.demand_as_made()
        entries = {**self._body.weights(), **self._update.average.of_state(ema=ema)}
        return {name: whole(tensor) for name, tensor in entries.items()}

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Load the return value of `state_dict`. Averages stay, and the next update continues from them.

        Raises:
            RuntimeError: Something is missing or misshapen; torch names it.
            StageError: A group of several processes computes the stage.
        """
        if any(map(is_split, self._body.parameters())):
            raise StageError(f"stage {self.index} is computed by a group: its weights are set by a checkpoint only")
        self._body.set_weights(state)

    @property
    def averages(self) -> Weights:
        """The averages of the trained parameters, by their names in `state_dict`.

        Empty before the first update, when the averages are the weights, and without `ema_decay`.
        """
        return self._update.average.entries

    def parameters(self) -> dict[str, torch.Tensor]:
        """Return the parameters by the unsplit model's names. The tensors are the stage's own, not copies."""
        return self._body.unsplit_parameters()

    def variables(self) -> dict[str, torch.Tensor]:
        """Return parameters and all buffers, with those that `state_dict` leaves out, by the unsplit model's names.

        The tensors are the stage's own, not copies.
        """
        return {**self._body.unsplit_buffers(), **self._body.weights()}

    def buffers(self) -> Weights:
        """Return copies of the layers' buffers, by the unsplit model's names."""
        return {name: copied(buffer) for name, buffer in self._body.unsplit_buffers().items()}

    def set_buffers(self, buffers: Weights) -> None:
        """Restore the return value of `buffers`. Unchanged buffers are not written to, since a graph may hold them."""
        now = self._body.unsplit_buffers()
        changed = (name for name, kept in buffers.items() if name not in now or not torch.equal(kept, now[name]))
        self._body.set_buffers({name: buffers[name] for name in changed})

    def _trained(self) -> list[tuple[str, torch.Tensor]]:
        return [(name, each) for name, each in self._body.unsplit_parameters().items() if each.requires_grad]
