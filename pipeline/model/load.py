"""Loads what the plan names (the user's own files, or dotted names) and cuts the model into stages.

User code is loaded by file path under a module name of its own, so that a user's `pipeline.py` never meets ours; its
folder comes last on the import path, so that the file can import its neighbours.
"""

import importlib
import importlib.util
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from itertools import accumulate, pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from stageline.pipeline.data.source import Source
from stageline.pipeline.errors import StagelineError
from stageline.pipeline.exit_code import ExitCode
from stageline.pipeline.plan import Plan
from stageline.pipeline.stage.stage import LrSchedulerFactory, Stage


class ModelRefused(StagelineError):
    """What the plan says of model, data, loss or cut cannot be used; the text names the place and the way out."""

    exit_code = ExitCode.REFUSED


@dataclass(frozen=True, slots=True)
class Segment:
    """One stage's share of the unsplit model: its layers, their names there, and the number of the first."""

    index: int
    first_layer: int
    names: tuple[str, ...]
    layers: tuple[nn.Module, ...]

    @property
    def trainable(self) -> bool:
        return any(p.requires_grad for layer in self.layers for p in layer.parameters())


def load(reference: str, base: Path, key: str) -> Any:
    """The object that `reference` names: `file.py:name` (the file relative to `base`) or `package.module.name`.

    `key` is the plan's key that holds the reference, for the error. Raises `ModelRefused`.
    """
    where, colon, name = reference.rpartition(":")
    if not colon:
        where, _, name = reference.rpartition(".")
    if not where or not name:
        raise ModelRefused(f'{key} = "{reference}" names nothing. Write "file.py:name" or "package.module.name".')
    if name == "py":
        raise ModelRefused(f'{key} = "{reference}" is a file: write "{reference}:NAME" for a NAME in it.')
    module = _load_file(base / where, key) if colon else _load_module(where, reference, key)
    if not hasattr(module, name):
        there = ", ".join(sorted(n for n, v in vars(module).items() if callable(v) and not n.startswith("_"))[:12])
        raise ModelRefused(f'{key} = "{reference}": {where} has no {name!r}. It has: {there or "nothing to call"}.')
    return getattr(module, name)


def call(function: Callable[..., Any], key: str, **options: Any) -> Any:
    """What the user's factory returns; whatever it raises comes back as `ModelRefused`, naming its line."""
    try:
        return function(**options)
    except (Exception, SystemExit) as error:  # user code may raise anything; the cause is handed on
        raise ModelRefused(f"{key}: {last_line(error)}") from error


def build(plan: Plan) -> list[Segment]:
    """The model that the plan's factory makes under the plan's seed, cut into stages.

    Raises `ModelRefused`: the factory is missing, fails or returns something else than an `nn.Sequential` or a list of
    stage modules, the cut is out of range, or two stages would share a parameter.
    """
    factory = load(plan.model.factory, base(plan), "model.factory")
    torch.manual_seed(plan.run.seed)
    model = call(factory, f'model.factory = "{plan.model.factory}"', **plan.model.options)
    return segment(model, plan.model.cut, plan.model.stages)


def segment(model: Any, cut: Sequence[int] | str | None = None, stages: int | None = None) -> list[Segment]:
    """`model` cut into stages: before each layer number in `cut`, or into `stages` of about equal parameter count.

    `model` is an `nn.Sequential` of layers, or a list with one module for each stage. Raises `ModelRefused`.
    """
    if isinstance(model, list | tuple):
        names, layers = [str(k) for k in range(len(model))], list(model)
        bounds = range(len(layers) + 1)
        if cut not in (None, "auto") or stages not in (None, len(layers)):
            raise ModelRefused(
                f"the model is given as {len(layers)} ready stages: leave model.cut and model.stages out, "
                f"or let the factory return an nn.Sequential"
            )
    else:
        names, layers = _layers_of(model)
        bounds = range(0)
    if not layers or not all(isinstance(layer, nn.Module) for layer in layers):
        raise ModelRefused("the model has no layers, or some are not torch modules")
    edges = list(bounds) or _edges(layers, cut, stages)
    segments = [
        Segment(k, low, tuple(names[low:high]), tuple(layers[low:high]))
        for k, (low, high) in enumerate(pairwise(edges))
    ]
    _refuse_shared_state(segments)
    return segments


def make_stage(plan: Plan, part: Segment, *, last: bool, device: str, stash_weights: bool) -> Stage:
    """The stage that computes `part`, with the plan's optimizer, and the plan's loss if it is the last."""
    optimizer = load(plan.optimizer.factory, base(plan), "optimizer.factory")
    return call(  # type: ignore[no-any-return]  # call hands on what Stage makes
        Stage,
        "optimizer",
        layers=part.layers,
        index=part.index,
        first_layer=part.first_layer,
        names=part.names,
        seed=plan.run.seed,
        optimizer=partial(optimizer, **plan.optimizer.options),
        lr_scheduler=_lr_scheduler(plan),
        loss=load_function(plan.model.loss, base(plan), "model.loss") if last else None,
        device=device,
        stash_weights=stash_weights,
    )


def load_function(reference: str, base: Path, key: str) -> Callable[..., Any]:
    """A function by name; a class, such as `torch.nn.BCELoss`, is made into one of its objects first."""
    found = load(reference, base, key)
    made = call(found, key) if isinstance(found, type) else found
    if not callable(made):
        raise ModelRefused(f'{key} = "{reference}" is a {type(made).__name__}, which cannot be called')
    return made  # type: ignore[no-any-return]


def load_source(plan: Plan) -> Source:
    """The plan's data source. Raises `ModelRefused` if it cannot be made or does not keep the promise of `Source`."""
    key = f'data.source = "{plan.data.source}"'
    factory = load(plan.data.source, base(plan), "data.source")
    source = call(factory, key, batch_size=plan.data.batch_size, seed=plan.run.seed, **plan.data.options)
    if not all(hasattr(source, name) for name in ("batch", "held_out", "steps_per_epoch")):
        raise ModelRefused(
            f"{key} returned a {type(source).__name__}; wanted is an object with batch(step), held_out() and "
            f"steps_per_epoch, such as pipeline.data.Rows(inputs, targets, batch_size, seed)"
        )
    steps = call(lambda: source.steps_per_epoch, f"{key}: steps_per_epoch")
    if not isinstance(steps, int) or steps < 1:
        raise ModelRefused(f"{key}: steps_per_epoch is {steps!r}; wanted is a whole number of at least 1")
    call(source.held_out, f"{key}: held_out()")
    return source  # type: ignore[no-any-return]  # what it promises was looked for above


def first_trainable(segments: Sequence[Segment]) -> int:
    """The first stage with anything to train; those below it run forward only. Raises `ModelRefused` if none has."""
    for part in segments:
        if part.trainable:
            return part.index
    raise ModelRefused("no parameter of the model requires a gradient: there is nothing to train")


def base(plan: Plan) -> Path:
    """The folder that file names in the plan are relative to: the plan file's own, or the current one."""
    return plan.file.parent if plan.file else Path()


def _lr_scheduler(plan: Plan) -> LrSchedulerFactory | None:
    if plan.lr_scheduler is None:
        return None
    factory = load(plan.lr_scheduler.factory, base(plan), "lr_scheduler.factory")
    return partial(factory, **plan.lr_scheduler.options)


def _load_file(path: Path, key: str) -> ModuleType:
    resolved = path.resolve()
    name = f"stageline_user_{sha256(str(resolved).encode()).hexdigest()[:12]}"
    if name in sys.modules:
        return sys.modules[name]
    if not resolved.is_file():
        raise ModelRefused(f"{key}: there is no file {path}")
    if (folder := str(resolved.parent)) not in sys.path:
        sys.path.append(folder)
    spec = importlib.util.spec_from_file_location(name, resolved)
    if spec is None or spec.loader is None:
        raise ModelRefused(f"{key}: {path} is not a Python file")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # user code may raise anything; the cause is handed on
        del sys.modules[name]
        raise ModelRefused(f"{key}: {path} could not be loaded: {last_line(error)}") from error
    return module


def _load_module(dotted: str, reference: str, key: str) -> ModuleType:
    try:
        return importlib.import_module(dotted)
    except (Exception, SystemExit) as error:  # importing runs user code, which may raise anything
        raise ModelRefused(f'{key} = "{reference}": cannot import {dotted}: {last_line(error)}') from error


def last_line(error: BaseException) -> str:
    """`ValueError: no such file (data.py, line 12)`: what a user needs to find their mistake."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {error}{place}"


def _layers_of(model: Any) -> tuple[list[str], list[nn.Module]]:
    if not isinstance(model, nn.Sequential) or type(model).forward is not nn.Sequential.forward:
        raise ModelRefused(
            f"the model is a {type(model).__name__}; wanted is an nn.Sequential, whose layers can be cut between, "
            f"or a list with one module for each stage"
        )
    own = [name for name, _ in (*model.named_parameters(recurse=False), *model.named_buffers(recurse=False))]
    if own:
        raise ModelRefused(
            f"{', '.join(own)} belong to the model itself, not to one of its layers: give them to a layer"
        )
    children = list(model.named_children())
    if len(children) != len(model):  # named_children leaves out repetitions
        raise ModelRefused("the same module stands twice in the model: make two, or put both uses into one layer")
    return [name for name, _ in children], [child for _, child in children]


def _edges(layers: Sequence[nn.Module], cut: Sequence[int] | str | None, stages: int | None) -> list[int]:
    if cut is None or cut == "auto" or isinstance(cut, str):
        return _balanced(layers, stages or 1)
    beyond = [c for c in cut if not 0 < c < len(layers)]
    if beyond:
        raise ModelRefused(
            f"model.cut = {list(cut)}: {beyond[0]} is out of range. The model has {len(layers)} layers, "
            f"so a cut is before layer 1 to {len(layers) - 1}."
        )
    return [0, *cut, len(layers)]


def _balanced(layers: Sequence[nn.Module], stages: int) -> list[int]:
    """Edges of the `stages` contiguous parts whose largest has as few parameters as possible; the earliest such cuts.

    Layers without parameters count as one, so that they are spread too.
    """
    if not 0 < stages <= len(layers):
        raise ModelRefused(f"model.stages = {stages}, but the model has {len(layers)} layers: at most one stage each")
    before = [0, *accumulate(1 + sum(p.numel() for p in layer.parameters()) for layer in layers)]
    best: list[list[tuple[int, list[int]]]] = [[(before[k], [0, k]) for k in range(len(before))]]
    for parts in range(2, stages + 1):
        best.append([(0, [])] * len(before))
        for end in range(parts, len(before)):
            best[-1][end] = min(
                (max(best[-2][middle][0], before[end] - before[middle]), [*best[-2][middle][1], end])
                for middle in range(parts - 1, end)
            )
    return best[-1][len(layers)][1]


def _refuse_shared_state(segments: Sequence[Segment]) -> None:
    owner: dict[int, str] = {}
    stage_of: dict[int, int] = {}
    for part in segments:
        for name, layer in zip(part.names, part.layers, strict=True):
            for key, state in (*layer.named_parameters(name), *layer.named_buffers(name)):
                if stage_of.setdefault(id(state), part.index) != part.index:
                    raise ModelRefused(
                        f"stages {stage_of[id(state)]} and {part.index} share one parameter or buffer "
                        f"({owner[id(state)]} is {key}): it lives on one stage. Cut elsewhere, or untie it."
                    )
                owner.setdefault(id(state), key)
