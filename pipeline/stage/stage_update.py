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
from stageline.pipeline.features.averages import NoAverage
from stageline.pipeline.model_names import matches
from stageline.pipeline.plan.errors import Setting
from stageline.pipeline.stage.layers.file_memory import FileMemory
from stageline.pipeline.stage.layers.memory import copied

from .layers.passage import LR_SCHEDULER, OPTIMIZER

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
    """Parameters with settings of their own in the optimizer.

    Attributes:
        match: Patterns, as in a shell. A parameter whose name matches one of them is in the group.
        settings: Settings by name, such as `weight_decay`.
    """

    match: tuple[str, ...]
    settings: Mapping[str, object]

    def has(self, name: str) -> bool:
        """Return True if a parameter of this name is in the group."""
        return matches(name, self.match)


def grouped(parameters: Mapping[str, torch.Tensor], groups: Sequence[ParameterGroup]) -> list[Any]:
    """Return the argument from which an optimizer is made: `parameters`, or a list of their groups with settings.

    A parameter that several groups match is in the first of these.

    Args:
        parameters: Parameters by their names in the unsplit model.
        groups: Groups with settings of their own. Parameters of none of them are in a first group without such.
    """
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
    """Return the optimizer of a stage; None without parameters.

    Args:
        factory: Makes an optimizer from parameters or groups of parameters.
        parameters: Parameters by their names in the unsplit model.
        groups: Groups with settings of their own.

    Raises:
        ModelRefused: Stages cannot have such an optimizer, or it does not know a setting of a group.
    """
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
    """Raise `ModelRefused` unless stages can each have such an optimizer for their own parameters."""
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
    """Raise `ValueError` if the groups of `optimizer`, which has not stepped, have other settings than `saved`.

    Settings that a step may change are not compared: any setting of an optimizer that is not torch's own, or has hooks;
    and if `scheduled`, all but the learning rate that the scheduler began with.

    Args:
        optimizer: The optimizer.
        saved: Groups of an optimizer's state.
        scheduled: True if a learning rate scheduler changes the settings.
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
    """Return True if `optimizer` is torch's and neither it nor all optimizers have hooks.

    A step of such an optimizer changes no settings, and changes each parameter by itself.
    """
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


def demand_steps(scheduler: torch.optim.lr_scheduler.LRScheduler | None, every: int | None) -> None:
    """Raise `ModelRefused` if `scheduler` steps by a value, and does not follow evaluations.

    Args:
        scheduler: The learning rate scheduler of a stage.
        every: Updates between two of its steps; None if it follows evaluations.
    """
    if scheduler is not None and every is not None and _takes_value(scheduler):
        raise ModelRefused(
            Setting("lr_scheduler.factory"),
            f": {type(scheduler).__name__} steps by the value of an evaluation; use ",
            Setting("lr_scheduler.every", "evaluation"),
        )


def _takes_value(scheduler: torch.optim.lr_scheduler.LRScheduler) -> bool:
    """Return True if a step takes a value that was measured, as that of `ReduceLROnPlateau` does."""
    return "metrics" in inspect.signature(scheduler.step).parameters


class UpdatedFiles:
    """The files of what an optimizer changes: parameters, or the state that it keeps, or both."""

    def __init__(self, memory: FileMemory, *, state: bool) -> None:
        """Take the files.

        Args:
            memory: Makes the files.
            state: True if the optimizer's state is in files, too.
        """
        self._memory = memory
        self._state = state

    @property
    def copied_state(self) -> Callable[[torch.Tensor], torch.Tensor]:
        """The function that copies a tensor of the optimizer's state to where the state lies."""
        return self._memory.copied if self._state else copied

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """Do `optimizer.step()`, for a part of the parameters at a time if the optimizer is torch's own without hooks.

        Raises what `optimizer.step()` raises.
        """
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
    """The update of a stage's parameters; without an optimizer it does nothing."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer | None,
        lr_scheduler: torch.optim.lr_scheduler.LRScheduler | None,
        lr_every: int | None,
        average: NoAverage,
        files: UpdatedFiles | None,
        note: Callable[[str], object],
    ) -> None:
        """Take the parts of an update.

        Args:
            optimizer: Updates the parameters; None if there is nothing to update.
            lr_scheduler: Steps after every `lr_every` steps.
            lr_every: Steps between two of the scheduler's; 0 if each update is told, None to follow evaluations.
            average: Averages of the weights.
            files: Files that hold weights, or the optimizer's state; None if both are in memory.
            note: Called with the name of the part that runs next.
        """
        self.optimizer = optimizer
        self.lr_scheduler = lr_scheduler
        self._lr_every = lr_every
        self.average = average
        self._note = note
        self._files = files
        self.copied_state = copied if files is None else files.copied_state  # to where the optimizer keeps its state

    def __call__(self, step: int | None, epoch: int = 0) -> bool:
        """Update with the gradients that are there, and clear them. Return True if there is anything to update.

        Args:
            step: Number of the step, counted from 0; None counts as the last of some `lr_every` steps.
            epoch: Steps between two of the scheduler's where `lr_every` is 0.
        """
        if self.optimizer is None:
            return False
        self._note(OPTIMIZER)
        if self._files is None:
            self.optimizer.step()
        else:
            self._files.step(self.optimizer)
        self.optimizer.zero_grad()
        self.average.update()
        if self.lr_scheduler is not None and self._is_due(step, epoch):
            self._note(LR_SCHEDULER)
            self.lr_scheduler.step()
        return True

    def evaluated(self, value: float) -> None:
        """Step a scheduler that follows evaluations; one that takes a value is given `value`."""
        if self.lr_scheduler is None or self._lr_every is not None:
            return
        self._note(LR_SCHEDULER)
        step: Callable[..., object] = self.lr_scheduler.step
        step(*([value] if _takes_value(self.lr_scheduler) else []))

    def _is_due(self, step: int | None, epoch: int) -> bool:
        return self._lr_every is not None and (step is None or (step + 1) % (self._lr_every or epoch) == 0)
