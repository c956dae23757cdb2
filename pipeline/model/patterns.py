"""Matches of the plan's patterns with the names in a cut model.

model.trainable    ["encoder.layer.40.*"]      parameters that are trained; all others are frozen
optimizer.groups   [{match = ["*.bias"]}]      parameters that get settings of the optimizer
taps.layers        ["encoder.layer.4?"]        layers: encoder.layer.40 to encoder.layer.49, on any stage
stage.N.recompute  ["transformer.h.*.mlp"]     layers, and modules in them
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch

from stageline.pipeline.errors import ModelRefused
from stageline.pipeline.features.recompute import recomputable
from stageline.pipeline.model_names import hint, matches, near, unmatched
from stageline.pipeline.plan import Plan, PlanError
from stageline.pipeline.plan.errors import Setting
from stageline.pipeline.stage.layers.layer import joined
from stageline.pipeline.stage.stage_update import ParameterGroup
from stageline.pipeline.tree import describe

from .segment import Segment


def groups_of(plan: Plan) -> tuple[ParameterGroup, ...]:
    """Return the plan's groups of parameters, as stages take them."""
    return tuple(map(_group, plan.optimizer.groups or ()))


def demand_matched(plan: Plan, segments: Sequence[Segment]) -> None:
    """Raise `PlanRefused` for a pattern in `optimizer.groups` that matches no parameter of the model."""
    names = list(dict.fromkeys(title for part in segments for title in part.titles.values()))
    for place, group in enumerate(groups_of(plan)):
        for pattern in unmatched(group.match, names):
            raise plan.refused(
                "optimizer.groups",
                f'no parameter of the model matches "{pattern}" of group {place}. {hint(pattern, names)}',
            )


def _group(given: Mapping[str, object]) -> ParameterGroup:
    match given:
        case {"match": [*patterns], **settings}:
            return ParameterGroup(tuple(map(str, patterns)), settings)
        case _:
            raise ValueError(f"{given} is no group of parameters")  # the plan has refused it


def demand_recomputable(plan: Plan, segments: Sequence[Segment]) -> None:
    """Raise `PlanRefused` for a pattern of recomputation that matches no layer and no module that a layer calls."""
    tables = {f"stage.{name}": table.recompute for name, table in (plan.stage or {}).items()}
    wanted = {"memory": None if plan.memory is None else plan.memory.recompute, **tables}
    wrong: list[PlanError] = []
    for table, patterns in wanted.items():
        here = [part for part in segments if table in ("memory", f"stage.{part.index}")]
        if isinstance(patterns, tuple) and (reasons := list(_reasons(patterns, here))):
            wrong.append(PlanError(f"{table}.recompute", "; ".join(reasons)))
    plan.demand_none(wrong)


def _reasons(patterns: Sequence[str], parts: Sequence[Segment]) -> Iterator[str]:
    names = [name for part in parts for name in recomputable(part.names, part.layers)]
    for pattern in unmatched(patterns, names):
        yield f'no layer or module of one matches "{pattern}"; there are {near(pattern, names)}'


def tapped_layers(plan: Plan, segments: Sequence[Segment]) -> dict[int, tuple[str, ...]]:
    """Return the names of the tapped layers, by stage, in the model's order; stages without any are left out.

    Raises:
        PlanRefused: A pattern matches no layer.
    """
    if plan.taps is None:
        return {}
    patterns, names = plan.taps.layers, [name for part in segments for name in part.names]
    if wrong := unmatched(patterns, names):
        reasons = (f'no layer of the model matches "{each}"; {_hint(each, names)}' for each in wrong)
        raise plan.refused("taps.layers", "; ".join(reasons))
    found = {part.index: tuple(name for name in part.names if matches(name, patterns)) for part in segments}
    return {stage: layers for stage, layers in found.items() if layers}


def _hint(pattern: str, names: Sequence[str]) -> str:
    holder = next((name for name in names if pattern.startswith(f"{name}.")), None)
    if holder is not None:
        return f"it names a part of layer {holder}, and only what whole layers return is stored"
    return f"layers have names such as {near(pattern, names)}"


def train_only(segments: Sequence[Segment], patterns: Sequence[str]) -> None:
    """Set `requires_grad` of each parameter: True if a name of it in the unsplit model matches a pattern, else False.

    A parameter that several layers use has several names, and is trained if any of them matches.

    Args:
        segments: The stages of the model.
        patterns: Patterns as `fnmatch.fnmatchcase` has them: `*` matches dots too.

    Raises:
        ModelRefused: A pattern matches nothing, or a parameter cannot be trained. Nothing has changed then.
    """
    named = [(name, parameter) for part in segments for name, parameter in _named_parameters(part)]
    matching = {id(each): (name, each) for name, each in named if matches(name, patterns)}
    if wrong := [*_unmatched(patterns, [name for name, _ in named]), *_untrainable(matching.values())]:
        raise ModelRefused(Setting("model.trainable"), f": {'; '.join(wrong)}")
    for _, parameter in named:
        parameter.requires_grad_(id(parameter) in matching)


def _named_parameters(part: Segment) -> Iterable[tuple[str, torch.nn.Parameter]]:
    for name, module in part.parts:
        for key, parameter in module.named_parameters(remove_duplicate=False):
            yield joined(name, key), parameter


def _unmatched(patterns: Sequence[str], names: Sequence[str]) -> Iterable[str]:
    for pattern in unmatched(patterns, names):
        yield f'no parameter of the model matches "{pattern}". {hint(pattern, names)}'


def _untrainable(matching: Iterable[tuple[str, torch.nn.Parameter]]) -> Iterable[str]:
    for name, parameter in matching:
        if not (parameter.is_floating_point() or parameter.is_complex()):
            yield (
                f"{name} is {describe(parameter)}, and only numbers with a fraction can be trained: "
                "leave it out of the patterns"
            )
