"""Making of the plan's model, and its cutting into stages."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from stageline.pipeline.errors import ModelRefused
from stageline.pipeline.plan import Plan
from stageline.pipeline.plan.errors import Setting
from stageline.pipeline.stage.layers.layer import BoundLayer, named_state

from .edges import EACH_LAYER, Cut, edges_of, layers_of
from .layered.families import stored_names_of
from .layered.layers import Layers
from .load import base_folder, factory_of
from .plan_stage import train_only
from .segment import Segment
from .stage_weights import StageWeights, demand_known, made_without_memory, twins_of, unset_buffers, variables_of
from .ties import with_own_copies


def build_segments(plan: Plan) -> list[Segment]:
    """Make the model with the plan's factory, under the plan's seed, and cut it into stages.

    If the plan says where weights are, the weights have no memory before `Segment.load`; no file is opened here.

    Raises:
        PlanRefused: Where to cut has yet to be measured.
        ModelRefused: The factory is missing or fails, how to cut its model is not known, the cut does not fit the
            model, or two stages would share a buffer.
    """
    plan.demand_cut()
    base = base_folder(plan).absolute()  # before user code may change the current folder
    wanted = plan.model
    model, segments = make_segments(
        factory_of(plan),
        plan.run.seed,
        wanted.cut,
        wanted.stages,
        wanted.trainable,
        stored=plan.loads_weights,
        accept_difference=bool(wanted.accept_difference),
    )
    return with_stored_weights(plan, model, segments, base)


def make_segments(
    make: Callable[[], Any],
    seed: int,
    cut: Cut = None,
    stages: int | None = None,
    trainable: Sequence[str] | None = None,
    *,
    stored: bool = False,
    accept_difference: bool = False,
) -> tuple[Any, list[Segment]]:
    """Return the model that `make` returns under `seed`, and its stages as `cut_model` makes them.

    Args:
        make: Makes the model.
        seed: Seed of torch's random numbers.
        cut: As for `cut_model`.
        stages: As for `cut_model`.
        trainable: As for `cut_model`.
        stored: True if the weights are in files; the model's parameters have no memory then.
        accept_difference: As for `cut_model`.

    Raises:
        ModelRefused: The model cannot be made or cut.
    """
    if not stored:
        torch.manual_seed(seed)
        model = make()
        segments = cut_model(model, cut, stages, trainable, accept_difference=accept_difference)
        _refuse_without_values(each for part in segments for each in part.state)
        return model, segments
    model, again = made_without_memory(make, seed)
    segments = cut_model(model, cut, stages, trainable, accept_difference=accept_difference)
    others = [] if again is None else cut_model(again, cut, stages, accept_difference=True)
    demand_known(_parts_of_all(segments), _parts_of_all(others))
    return model, segments


def with_stored_weights(plan: Plan, model: Any, segments: Sequence[Segment], base: Path) -> list[Segment]:
    """Return the stages of `model`, each with the place of its weights if the plan names one.

    Args:
        plan: The plan.
        model: The model that the stages were cut from.
        segments: The stages.
        base: Folder that the plan's paths start from.
    """
    if not plan.loads_weights:
        return list(segments)
    parts = _parts_of_all(segments)
    variables = variables_of(parts)
    copies = {name: first for part in segments for name, first in part.copies.items()}
    known = frozenset([*variables, *unset_buffers(parts)]), twins_of(variables, copies), stored_names_of(model)
    return [
        replace(part, stored=StageWeights(found[0], base / found[1], part.index, *known)) if found else part
        for part in segments
        for found in [plan.weights_of(part.index)]
    ]


def cut_model(
    model: Any,
    cut: Cut = None,
    stages: int | None = None,
    trainable: Sequence[str] | None = None,
    *,
    accept_difference: bool = False,
) -> list[Segment]:
    """Cut `model` into stages.

    Args:
        model: An `nn.Sequential`, a model of a known family, `Layers`, or a list with one module for each stage.
        cut: Numbers or names of the layers before which to cut; None or "auto" cuts into `stages` stages of about equal
            parameter count.
        stages: Number of stages, if `cut` does not give it.
        trainable: Patterns of names of parameters; only these are trained. None: those that require a gradient.
        accept_difference: True to cut a traced model though its layers compute something other than its forward.

    Raises:
        ModelRefused: The model cannot be cut so.
    """
    if isinstance(model, Layers) and model.difference and not accept_difference:
        raise ModelRefused(model.difference)
    ready = isinstance(model, list | tuple)
    names, layers = (list(map(str, range(len(model)))), list(model)) if ready else layers_of(model, cut)
    if ready and cut == EACH_LAYER:
        raise ModelRefused(
            f"the model is given as {len(layers)} ready stages, which are not cut: leave model.balance and "
            f"model.stage_memory out, or let the factory return an nn.Sequential"
        )
    if ready and (cut not in (None, "auto") or stages not in (None, len(layers))):
        raise ModelRefused(
            f"the model is given as {len(layers)} ready stages: leave ",
            Setting("model.cut"),
            " and ",
            Setting("model.stages"),
            " out, or let the factory return an nn.Sequential",
        )
    if not layers or not all(isinstance(layer, torch.nn.Module) for layer in layers):
        raise ModelRefused("the model has no layers, or some are not torch modules")
    _refuse_without_shape(names, layers)
    edges = range(len(layers) + 1) if ready else edges_of(names, layers, cut, stages, _more_layers(model))
    segments = [
        Segment(k, low, tuple(names[low:high]), tuple(layers[low:high]))
        for k, (low, high) in enumerate(pairwise(edges))
    ]
    _refuse_impossible_cuts(segments)
    _refuse_shared_buffers(segments)
    _refuse_other_state(segments)
    if trainable is not None:
        train_only(segments, trainable)
    return with_own_copies(_with_titles(model, layers, segments))


def demand_made(model: torch.nn.Module, *, stored: bool) -> None:
    """Raise `ModelRefused` for a parameter or buffer that has no shape or, unless `stored`, no values.

    Args:
        model: Model that is not cut yet.
        stored: True if the weights are in files.
    """
    _refuse_without_shape([""], [model])
    _refuse_without_values([] if stored else named_state(model, ""))


def first_trainable(segments: Sequence[Segment]) -> int:
    """Return the number of the first stage that trains. Stages below it run forward only.

    Raises:
        ModelRefused: No stage trains.
    """
    for part in segments:
        if part.trainable:
            return part.index
    raise ModelRefused(
        "no parameter of the model requires a gradient: there is nothing to train. Name some in ",
        Setting("model.trainable"),
        ", or leave their requires_grad True in the factory",
    )


def frozen_stages(segments: Sequence[Segment]) -> tuple[int, ...]:
    """Return the indexes of stages after the first trainable one that have no trainable parameter."""
    first = first_trainable(segments)
    return tuple(part.index for part in segments if part.index > first and not part.trainable)


def _more_layers(model: Any) -> str:
    return model.more_layers() if isinstance(model, Layers) else ""


def _with_titles(model: Any, layers: Sequence[torch.nn.Module], segments: Sequence[Segment]) -> list[Segment]:
    """Return the segments, each with the numbers and names of its parameters in `model.named_parameters()`."""
    whole = model if isinstance(model, torch.nn.Module) else torch.nn.ModuleList(layers)
    parameters = model.parameters if isinstance(model, Layers) else dict(whole.named_parameters())
    known = {id(parameter): (number, name) for number, (name, parameter) in enumerate(parameters.items())}
    return [_titled(part, known) for part in segments]


def _titled(part: Segment, known: Mapping[int, tuple[int, str]]) -> Segment:
    found = {name: known[id(state)] for name, state in part.state if id(state) in known}
    return replace(
        part,
        order={name: number for name, (number, _) in found.items()},
        titles={name: title for name, (_, title) in found.items()},
    )


def _parts_of_all(segments: Sequence[Segment]) -> list[tuple[str, torch.nn.Module]]:
    return [part for segment in segments for part in segment.parts]


def _refuse_impossible_cuts(segments: Sequence[Segment]) -> None:
    for part in segments[1:]:
        first = part.layers[0]
        if isinstance(first, BoundLayer) and first.no_cut:
            raise ModelRefused(first.no_cut)


def _refuse_other_state(segments: Sequence[Segment]) -> None:
    """Raise `ModelRefused` for an entry of `state_dict()` that is no tensor, since it would have to be pickled."""
    for part in segments:
        for name, value in part.weights.items():
            if not isinstance(value, torch.Tensor):
                raise ModelRefused(
                    f"{name} in the state_dict() of the model is of type {type(value).__name__}, and stages save "
                    f"tensors "
                    "alone. Let get_extra_state return a tensor, which set_extra_state takes, or register a buffer "
                    "(docs/guides/models.md)"
                )


def _refuse_shared_buffers(segments: Sequence[Segment]) -> None:
    owners: dict[int, tuple[int, str]] = {}
    for part in segments:
        for key, state in part.state:
            owner, first = owners.setdefault(id(state), (part.index, key))
            if owner != part.index and not isinstance(state, torch.nn.Parameter):
                raise ModelRefused(
                    f"stages {owner} and {part.index} share one buffer ({first} is {key}): it lives on one stage. Cut "
                    f"elsewhere, or give each a buffer of its own (docs/guides/models.md)."
                )


def _refuse_without_shape(names: Sequence[str], layers: Sequence[torch.nn.Module]) -> None:
    for name, state in chain.from_iterable(map(named_state, layers, names)):
        if is_lazy(state):
            raise ModelRefused(
                f"{name} has no shape before the first forward, as in nn.LazyLinear, and stages are made before that. "
                f"Give the layer its sizes, as nn.Linear takes them, or call the model once in the factory"
            )


def _refuse_without_values(named: Iterable[tuple[str, torch.Tensor]]) -> None:
    for name, state in named:
        if state.is_meta:
            raise ModelRefused(
                f"{name} has no values: it is on torch's meta device. Make the model on the CPU, or name files of "
                f"weights (model.weights; in a script, weights)"
            )
