"""Shares of a checkpoint's stages for other stages, and the states of these.

old stage 0   0.weight 0.bias                  new stage 0   of old stages 0 and 1
old stage 1   2.weight 2.bias
old stage 2   4.weight 4.bias                  new stage 1   of old stage 2

Most of a stage's state goes by names: weights and buffers, averages, and the optimizer's state of each parameter. The
rest, the learning rate scheduler's state and the settings of the optimizer's groups, has to be the same in all stages
that become one.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from stageline.pipeline.errors import ForeignState
from stageline.pipeline.model.stage_layout import Form, StageLayout
from stageline.pipeline.plan.keys.names import hint
from stageline.pipeline.stage.stage_state import Settings, StageState

_LOOKED_AT = 1000  # names among which the nearest is looked for


@dataclass(frozen=True, slots=True)
class Contents:
    """Contents of a checkpoint's stage: the forms of its `weights` by name, and the names of its `buffers`."""

    weights: Mapping[str, Form]
    buffers: frozenset[str]


@dataclass(frozen=True, slots=True)
class Share:
    """Share of a new stage in old ones: it takes `names` from the stages `sources`; `missing` are in none of them."""

    layout: StageLayout
    names: tuple[str, ...]
    sources: tuple[int, ...]
    missing: tuple[str, ...]


def shares_of(layouts: Sequence[StageLayout], contents: Mapping[int, Contents], stages: int) -> list[Share]:
    """Return the share of each new stage in a checkpoint.

    Args:
        layouts: Layouts of the new stages.
        contents: Contents of the old stages, as far as they are known.
        stages: Number of old stages.
    """
    owners: dict[str, list[int]] = {}
    for stage, of in sorted(contents.items()):
        for name in (*of.weights, *of.buffers):
            owners.setdefault(name, []).append(stage)
    every = {name for layout in layouts for name in (*layout.entries, *layout.buffers)}
    later: dict[int, list[str]] = {layout.stage: [] for layout in layouts}  # which the layers have made while training
    for name in owners.keys() - every:
        if (deepest := max(layouts, key=lambda layout: layout.depth(name))).depth(name):
            later[deepest.stage].append(name)
    return [_share(layout, later[layout.stage], owners, stages, last=layout is layouts[-1]) for layout in layouts]


def _share(layout: StageLayout, later: list[str], owners: Mapping[str, list[int]], stages: int, *, last: bool) -> Share:
    wanted = (*layout.entries, *layout.buffers, *sorted(later))
    missing = tuple(name for name in layout.entries if name not in owners)
    sources = {stages - 1} if last else set()  # the losses are there
    for found in sorted((owners[name] for name in wanted if name in owners), key=len):
        if sources.isdisjoint(found):  # stages share it, and none of them is needed anyway
            sources.add(found[0])
    return Share(layout, tuple(name for name in wanted if name in owners), tuple(sorted(sources)), missing)


def faults_of(shares: Sequence[Share], contents: Mapping[int, Contents]) -> list[str]:
    """Return how the model differs from a checkpoint whose stages are all known: names, shapes and dtypes."""
    stored = {name: form for of in contents.values() for name, form in of.weights.items()}
    missing = [name for share in shares for name in share.missing]
    taken = {name for share in shares for name in share.names}
    strange = [name for name in stored if name not in taken]
    forms = {name: form for share in shares for name, form in share.layout.forms.items()}
    return [
        *(f"{name} is missing{hint(name, strange[:_LOOKED_AT])}" for name in missing),
        *(f"{name} is not the model's{hint(name, missing[:_LOOKED_AT])}" for name in strange),
        *(
            f"{name} is {_shown(stored[name])} there, the model wants {_shown(form)}"
            for name, form in forms.items()
            if name in stored and stored[name] != form
        ),
    ]


def regrouped(share: Share, states: Sequence[StageState]) -> StageState:
    """Return the state of a new stage from the states of its sources, in their order.

    Raises `ForeignState` if they disagree about state that a stage has once.
    """
    layout, names = share.layout, set(share.names)
    if any(state.in_flight or state.previous for state in states):
        raise ForeignState("microbatches were in flight, as in asynchronous mode: no other stages can go on with them")
    if kept := sorted({name for state in states for name in state.features}):
        raise ForeignState(f"{', '.join(kept)} keeps a state of each stage: no other stages can go on with it")
    groups = None if layout.groups is None else _Groups(layout, states)
    return StageState(
        weights=_picked(names, [state.weights for state in states]),
        buffers=_picked(names, [state.buffers for state in states]),
        gradients=_picked(set(layout.forms), [state.gradients for state in states]),
        optimizer=None if groups is None else groups.settings(),
        parameters=() if layout.groups is None else tuple(name for group in layout.groups for name in group),
        lr_scheduler=None if groups is None else _lr_scheduler(layout, states),
        averages=_picked(names, [state.averages for state in states]),
    )


class _Groups:
    """Optimizer of a stage, made from the optimizers of others."""

    def __init__(self, layout: StageLayout, states: Sequence[StageState]) -> None:
        self._layout = layout
        self._state: dict[str, Any] = {}
        self._options: dict[str, Settings] = {}
        self._first: list[Settings] = []  # the options of the first optimizer's groups
        for state in states:
            if state.optimizer is not None:
                self._add(state.optimizer, state.parameters)

    def settings(self) -> Settings:
        """Return the optimizer's state, with parameters numbered as torch's `state_dict` numbers them."""
        names = [name for group in self._layout.groups or () for name in group]
        found = [self._stored(name) for name in names]
        state = {number: self._state[name] for number, name in enumerate(found) if name in self._state}
        return {"state": state, "param_groups": list(self._groups())}

    def _add(self, optimizer: Settings, names: Sequence[str]) -> None:
        for group in optimizer["param_groups"]:
            options = {key: value for key, value in group.items() if key != "params"}
            if len(self._first) < len(optimizer["param_groups"]):
                self._first.append(options)
            for number in group["params"]:
                self._options[names[number]] = options
                if number in optimizer["state"]:
                    self._state[names[number]] = optimizer["state"][number]

    def _groups(self) -> Iterator[Settings]:
        number = 0
        for place, group in enumerate(self._layout.groups or ()):
            yield {**self._options_of(place, group), "params": list(range(number, number + len(group)))}
            number += len(group)

    def _options_of(self, place: int, group: Sequence[str]) -> Settings:
        given = [self._options[self._stored(name)] for name in group] or self._first[place : place + 1]
        if not given:
            raise self._refused(f"no optimizer of the checkpoint has a group {place}")
        if odd := next((each for each in given if not _same(each, given[0])), None):
            keys = ", ".join(str(key) for key in given[0] if not _same(given[0][key], odd.get(key)))
            raise self._refused(f"parameters that come into one group have different {keys}")
        return given[0]

    def _stored(self, name: str) -> str:
        """Return the name under which the checkpoint's optimizers know a parameter. Raises `ForeignState`."""
        found = next((each for each in self._layout.named(name) if each in self._options), None)
        if found is None:
            raise self._refused(f"no optimizer of the checkpoint has {name}")
        return found

    def _refused(self, reason: str) -> ForeignState:
        return ForeignState(f"the optimizer of stage {self._layout.stage} cannot go on: {reason}. Cut elsewhere")


def _lr_scheduler(layout: StageLayout, states: Sequence[StageState]) -> Settings | None:
    found = [state for state in states if state.lr_scheduler is not None]
    if not found:
        return None
    groups = {len(state.optimizer["param_groups"]) for state in found if state.optimizer}
    alike = all(_same(each.lr_scheduler, found[0].lr_scheduler) for each in found)
    if not alike or groups != {len(layout.groups or ())}:
        raise ForeignState(
            f"the learning rate scheduler of stage {layout.stage} cannot go on: it has another state in each of the "
            "stages that become one. Cut elsewhere"
        )
    return found[0].lr_scheduler


def _picked(names: set[str], states: Sequence[Mapping[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {name: tensor for state in states for name, tensor in state.items() if name in names}


def _same(one: Any, other: Any) -> bool:
    """Return True if two settings are equal, tensors bit by bit."""
    match one, other:
        case torch.Tensor(), torch.Tensor():
            return one.dtype == other.dtype and torch.equal(one, other)
        case dict(), dict():
            return one.keys() == other.keys() and all(_same(each, other[key]) for key, each in one.items())
        case (list(), list()) | (tuple(), tuple()):
            return len(one) == len(other) and all(map(_same, one, other))
        case _:
            return type(one) is type(other) and bool(one == other)


def _shown(form: Form) -> str:
    dtype, shape = form
    return f"{dtype} {list(shape)}"
