"""Makes the optimizer of a stage: of all its parameters alike, or of groups of them with settings of their own.

groups = [{match = ["*.bias", "*norm*"], weight_decay = 0.0}]

    0.weight 4.weight               the first group, with the settings of all
    0.bias 2.norm.weight 4.bias     the next one, with those and its own

Each stage makes every group, also where it has no parameter of it: a learning rate scheduler, and a checkpoint that is
cut in another way, know groups by their places.

Whether an optimizer has the settings of the one whose state it is to go on from.

`load_state_dict` of torch takes over the settings in the state, so another learning rate would be ignored.
"""

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim import optimizer as torch_optimizer

from stageline.pipeline.errors import ModelRefused
from stageline.pipeline.model_names import matches

OptimizerFactory = Callable[[Iterable[Any]], torch.optim.Optimizer]
# They compute one value of all parameters, of which a stage has a part.
_OVER_ALL = ("DAdaptAdaGrad", "DAdaptAdam", "DAdaptAdan", "DAdaptLion", "DAdaptSGD", "Prodigy", "SAM")
Group = Mapping[str, Any]  # of an optimizer's `param_groups`

_INITIAL = "initial_lr"  # what a learning rate scheduler began with
_WAY_OUT = "Give it the optimizer that it was trained with, or begin another run"


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
