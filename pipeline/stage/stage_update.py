"""The end of a step: the optimizer steps, gradients are cleared, averages and the rate change.

step                      0   1   2   3   4   5         lr_every = 3
optimizer                 x   x   x   x   x   x
averages of weights       x   x   x   x   x   x
learning rate scheduler           x           x

An optimizer has all parameters of a stage alike, or groups of them with settings of their own:

groups = [{match = ["*.bias", "*norm*"], weight_decay = 0.0}]

    0.weight 4.weight               the first group, with the settings of all
    0.bias 2.norm.weight 4.bias     the next one, with those and its own

Each stage makes every group, also where it has no parameter of it: a learning rate scheduler, and a checkpoint that is
cut in another way, know groups by their places.

`load_state_dict` of torch takes over the settings in the state, so another learning rate would be ignored:
`require_same_settings` refuses it.

Where state lies in files, the optimizer steps for a part of its parameters at a time, and files are read ahead. The
bits are those of one step, since torch's optimizers change each parameter by itself. An optimizer that is not torch's
own, or has hooks, steps as a whole.
"""

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim import optimizer as torch_optimizer

from stageline.pipeline.errors import ModelRefused
from stageline.pipeline.features.averages import WeightAverage
from stageline.pipeline.model_names import matches
from stageline.pipeline.stage.layers.file_memory import FileMemory
from stageline.pipeline.stage.layers.memory import copied
from stageline.pipeline.stage.layers.seeded_layers import LR_SCHEDULER, OPTIMIZER, Activity

OptimizerFactory = Callable[[Iterable[Any]], torch.optim.Optimizer]
# They compute one value of all parameters, of which a stage has a part.
_OVER_ALL = ("DAdaptAdaGrad", "DAdaptAdam", "DAdaptAdan", "DAdaptLion", "DAdaptSGD", "Prodigy", "SAM")
Group = Mapping[str, Any]  # of an optimizer's `param_groups`

_INITIAL = "initial_lr"  # what a learning rate scheduler began with
_WAY_OUT = "Give it the optimizer that it was trained with, or begin another run"
_PART = 1 << 24  # bytes of parameters that are updated together
LrSchedulerFactory = Callable[[torch.optim.Optimizer], torch.optim.lr_scheduler.LRScheduler]


@dataclass(frozen=True, slots=True)
class ParameterGroup:
    """Parameters whose names `match` one of these patterns, as in a shell, have these `settings` of their own."""

    match: tuple[str, ...]
    settings: Mapping[str, object]

    def has(self, name: str) -> bool:
        return matches(name, self.match)


def grouped(parameters: Mapping[str, torch.Tensor], groups: Sequence[ParameterGroup]) -> list[Any]:
    """What an optimizer is made of: `parameters`, by their names in the unsplit model, or lists of them with the
    settings of their groups. One that several groups match is of the first of these."""
    if not groups:
        return list(parameters.values())
    members: list[list[torch.Tensor]] = [[] for _ in range(len(groups) + 1)]
    for name, parameter in parameters.items():
        place = next((number for number, group in enumerate(groups, 1) if group.has(name)), 0)
        members[place].append(parameter)
    own = ({}, *(group.settings for group in groups))
    return [{"params": each, **settings} for each, settings in zip(members, own, strict=True)]


def make_optimizer(
    factory: OptimizerFactory, parameters: Mapping[str, torch.Tensor], groups: Sequence[ParameterGroup]
) -> torch.optim.Optimizer | None:
    """None without parameters. Raises `ModelRefused` for an optimizer that stages cannot have, and for settings of a
    group that it does not know."""
    if not parameters:
        return None
    made = factory(grouped(parameters, groups))
    _demand_separable(made)
    known = getattr(made, "defaults", None)
    for place, group in enumerate(groups):
        if known is not None and (strange := [name for name in group.settings if name not in known]):
            raise ModelRefused(
                f"optimizer.groups: group {place} sets {strange[0]}, which {type(made).__name__} does not know; it has "
                f"{', '.join(known)}"
            )
    return made


def _demand_separable(made: torch.optim.Optimizer) -> None:
    """Raises `ModelRefused` unless stages can each have one for their own parameters."""
    name = type(made).__name__
    step = inspect.signature(made.step).parameters.get("closure")
    if step is not None and step.default is inspect.Parameter.empty:
        raise ModelRefused(
            f"the optimizer {name} needs a closure, which computes the loss again: no stage can. Use one whose step "
            f"takes none, such as torch.optim.AdamW"
        )
    if name in _OVER_ALL:
        raise ModelRefused(
            f"the optimizer {name} computes with all parameters at once, and each stage has its own: use one that "
            f"updates every parameter by itself, such as torch.optim.AdamW"
        )


def require_same_settings(optimizer: Optimizer, saved: list[Group], *, scheduled: bool) -> None:
    """Raises `ValueError` if the groups of `optimizer`, which has not stepped, have other settings than `saved`.

    What a step may change is not compared: any setting of an optimizer that is not torch's own, or has hooks; and if it
    is `scheduled`, all but the learning rate that the scheduler began with.
    """
    if not is_torchs_own(optimizer):
        return
    for mine, theirs in zip(optimizer.param_groups, saved, strict=False):  # another number of groups is torch's to find
        if unknown := sorted(theirs.keys() - mine.keys() - {_INITIAL}):
            kind = type(optimizer).__name__
            raise ValueError(f"the optimizer is a {kind}, and that in the state has {', '.join(unknown)}. {_WAY_OUT}")
        for key in sorted(_compared(theirs, scheduled)):
            if key in mine and _plain(mine[key]) != _plain(theirs[key]):
                raise ValueError(
                    f"the optimizer's {key} is {_plain(mine[key])} here, and {_plain(theirs[key])} in the state. "
                    f"{_WAY_OUT}"
                )


def is_torchs_own(optimizer: Optimizer) -> bool:
    """Whether it is of torch and has no hooks, nor all optimizers have: a step changes no settings, and each parameter
    by itself."""
    own = (getattr(optimizer, f"_optimizer_step_{when}_hooks", None) for when in ("pre", "post"))
    of_all = (getattr(torch_optimizer, f"_global_optimizer_{when}_hooks", None) for when in ("pre", "post"))
    return type(optimizer).__module__.startswith("torch.optim.") and not any((*own, *of_all))


def _compared(group: Group, scheduled: bool) -> set[str]:
    return group.keys() & {_INITIAL} if scheduled else group.keys() - {"params", _INITIAL}


def _plain(value: Any) -> Any:
    match value:
        case Tensor():
            return value.tolist()
        case tuple() | list():
            return [_plain(each) for each in value]
        case _:
            return value


class UpdatedFiles:
    """The files in `memory` of what an optimizer changes: parameters, or the `state` that it keeps, or both."""

    def __init__(self, memory: FileMemory, *, state: bool) -> None:
        self._memory = memory
        self._state = state

    @property
    def copied_state(self) -> Callable[[torch.Tensor], torch.Tensor]:
        """Copies a tensor to where those are that the optimizer keeps."""
        return self._memory.copied if self._state else copied

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """As `optimizer.step()`. Raises what that raises."""
        groups = optimizer.param_groups
        if not is_torchs_own(optimizer):
            optimizer.step()
            for group in groups:
                self._take_state(optimizer, group["params"])
            return
        try:
            for group in groups:
                optimizer.param_groups = [group]
                self._step_of_group(optimizer, group)
        finally:
            optimizer.param_groups = groups

    def _step_of_group(self, optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> None:
        parameters = group["params"]
        try:
            parts = [*_parts(parameters)]
            for part in parts[:1]:
                self._memory.fetch(_used_by_step(optimizer, part))
            for part, following in zip(parts, [*parts[1:], []], strict=False):  # there may be none of this stage
                self._memory.fetch(_used_by_step(optimizer, following))
                group["params"] = part
                optimizer.step()
                self._take_state(optimizer, part)
        finally:
            group["params"] = parameters

    def _take_state(self, optimizer: torch.optim.Optimizer, parameters: Sequence[torch.Tensor]) -> None:
        if self._state:
            self._memory.take_state(optimizer, parameters)


def _used_by_step(optimizer: torch.optim.Optimizer, parameters: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
    for parameter in parameters:
        state = optimizer.state[parameter].values() if parameter in optimizer.state else ()
        yield from (each for each in (parameter, parameter.grad, *state) if isinstance(each, torch.Tensor))


def _parts(parameters: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    part: list[torch.Tensor] = []
    for parameter in parameters:
        part.append(parameter)
        if sum(each.nbytes for each in part) >= _PART:
            yield part
            part = []
    if part:
        yield part


class StageUpdate:
    """Of `parameters`, by their names in the unsplit model; without any there is no `optimizer`, and nothing to do.

    The learning rate scheduler steps after every `lr_every` steps; `average` is that of the weights, None if there is
    none.
    """

    def __init__(
        self,
        parameters: Mapping[str, torch.Tensor],
        optimizer: OptimizerFactory | None,
        groups: Sequence[ParameterGroup],
        lr_scheduler: LrSchedulerFactory | None,
        lr_every: int,
        average: WeightAverage | None,
        activity: Activity,
    ) -> None:
        self.optimizer = None if optimizer is None else make_optimizer(optimizer, parameters, groups)
        self.lr_scheduler = None if lr_scheduler is None or not self.optimizer else lr_scheduler(self.optimizer)
        self._lr_every = lr_every
        self.average = average
        self._activity = activity
        self.files: UpdatedFiles | None = None  # which have weights, or what the optimizer keeps

    @property
    def copied_state(self) -> Callable[[torch.Tensor], torch.Tensor]:
        """Copies a tensor to where those are that the optimizer keeps."""
        return copied if self.files is None else self.files.copied_state

    def __call__(self, step: int | None) -> bool:
        """Updates with the gradients that are there, after `step`, counted from 0; None counts as the last of some
        `lr_every`. Whether there is anything to update."""
        if self.optimizer is None:
            return False
        self._activity.at = OPTIMIZER
        if self.files is None:
            self.optimizer.step()
        else:
            self.files.step(self.optimizer)
        self.optimizer.zero_grad()
        if self.average is not None:
            self.average.update()
        if self.lr_scheduler is not None and (step is None or (step + 1) % self._lr_every == 0):
            self._activity.at = LR_SCHEDULER
            self.lr_scheduler.step()
        return True
