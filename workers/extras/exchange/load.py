"""The unsplit model of a run, with its weights, after training or in the middle of it; the stages of a plan's model.

model = stageline.load("runs/digits-20260131-101500-1f0c")

The plan of a run, and the place of the code that it names, are in its folder:

runs/digits-20260131-101500-1f0c/plan.json       the plan as the run has it: options, cut, workers, seed
                                 process.json    where the plan's file is, which file names in it begin at
                                 code.json       the files of a script whose workers joined by names

Stages of another plan can go on from a checkpoint of the run; an exported model has a config.json.
"""

import json
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import structlog
import torch

from stageline.pipeline.digest import tensor_digests, weights_sha256
from stageline.pipeline.errors import ModelRefused
from stageline.pipeline.model.cut import build_segments, cut_model
from stageline.pipeline.model.layered.layers import Layers
from stageline.pipeline.model.load import factory_of, references_of
from stageline.pipeline.model.object_names import is_of_script
from stageline.pipeline.model.plan_stage import groups_of, optimizer_of
from stageline.pipeline.model.segment import Segment, layouts_of
from stageline.pipeline.model.stage_layout import StageLayout
from stageline.pipeline.model.stage_weights import unset_buffers
from stageline.pipeline.model.tensor_files import listed, misformed, misnamed
from stageline.pipeline.plan import Plan, PlanError, PlanRefused
from stageline.pipeline.stage.layers.passage import generators_kept
from stageline.workers.checkpoint.continuable import needs_recut
from stageline.workers.checkpoint.recut import Recut
from stageline.workers.checkpoint.regroup import Contents
from stageline.workers.checkpoint.snapshot import SnapshotDamaged
from stageline.workers.checkpoint.source import CheckpointSource, NoCheckpoint, source_in
from stageline.workers.runs import folder as runs
from stageline.workers.runs.owner import read_owner
from stageline.workers.runs.records import hashes_of, read_code, recut_id

from .stored_weights import StoredWeights, WeightsUnusable, take_weights

PLAN_FILE = "stageline.toml"
_WAY_OUT = "Pass the module whose weights they are: stageline.load(RUN, model=...)"
log = structlog.get_logger()


def planned(source: CheckpointSource, place: Path | None = None) -> Plan:
    """Return the run's plan, with the file that names its code.

    Args:
        source: Checkpoints of the run.
        place: File of the plan, or its folder. By default the file that the run was begun with.

    Raises:
        ModelRefused: The model is an object of a script, or the code is not there.
    """
    plan = source.plan
    if is_of_script(plan.model.factory):
        raise ModelRefused(
            f"run {source.run} is a script's, which gave its model as an object that no file names. {_WAY_OUT}; or go "
            "on with the run by Line.resume, and call line.predict"
        )
    _demand_code(source)
    if not any(":" in reference for _, reference in references_of(plan)):
        return plan
    return plan.model_copy(update={"file": _file_at(place) if place is not None else _former_file(source)})


def _file_at(place: Path) -> Path:
    file = place / PLAN_FILE if place.is_dir() else place
    if not file.parent.is_dir():
        raise ModelRefused(f"there is no folder {file.parent}: name the plan of the run, or the folder that it is in")
    return file.absolute()


def _former_file(source: CheckpointSource) -> Path:
    """Return the file of the plan that the run was begun with. Raises `ModelRefused` if it is not here.

    A relative name is looked up from the folder that the run was begun in, then from the current one.
    """
    try:
        owner = read_owner(source.folder)
    except ValueError:
        owner = None
    named = "" if owner is None else owner.plan
    for folder in (_former_folder(source), Path()) if named else ():
        place = folder / named
        file = place / PLAN_FILE if place.is_dir() else place
        if file.exists():
            return file.absolute()
    was = f", which was {named}," if named else ""
    raise ModelRefused(
        f"the code of run {source.run} is beside its plan{was} and that is not here: name the plan, or the folder with "
        "the code, by plan= (stageline.load), or --plan (commands)"
    )


def _former_folder(source: CheckpointSource) -> Path:
    """Return the folder that the run was begun in, as far as `run.dir` tells."""
    runs = source.plan.run.dir
    return source.folder.resolve().parent if runs.is_absolute() else source.folder.resolve().parents[len(runs.parts)]


def _demand_code(source: CheckpointSource) -> None:
    """Put the folder of a script's files first on the import path.

    Raises:
        ModelRefused: The files are not here, or have changed since the run.
    """
    code = read_code(source.folder)
    if code is None or not code.files:
        return
    places = (Path(each) for each in ("", *sys.path))
    root = next((each.absolute() for each in places if all((each / file).is_file() for file in code.files)), None)
    if root is None:
        raise ModelRefused(
            f"the code of run {source.run}, {', '.join(code.files)}, is not here: go to the folder with the script. "
            f"{_WAY_OUT}"
        )
    now = hashes_of(root, code.files)
    if changed := [file for file, before in code.files.items() if now[file] != before]:
        raise ModelRefused(f"{', '.join(changed)} in {root} changed since run {source.run} was begun. {_WAY_OUT}")
    if str(root) not in sys.path:
        sys.path.insert(0, str(root))


@dataclass(frozen=True, slots=True)
class RunModel:
    """Model of the run named `run`, with its weights.

    `made` is the result of the model's factory. `module` has the `weights`; it is the same object unless the factory
    returns `Layers` or a list of stages. `plan` names the place of the model's code, if there is one.
    """

    run: str
    made: Any
    module: torch.nn.Module
    plan: Plan
    weights: StoredWeights

    def on(self, device: str) -> "RunModel":
        """Return the model with a plan that has all workers on `device`."""
        workers = tuple(worker.model_copy(update={"device": device}) for worker in self.plan.workers)
        return replace(self, plan=self.plan.model_copy(update={"workers": workers}))

    @property
    def layer_names(self) -> list[str]:
        """Names of the layers, in order."""
        return [name for part in _uncut(self.made) for name in part.names]


def load(
    run: str | Path,
    *,
    model: torch.nn.Module | Layers | None = None,
    plan: str | Path | None = None,
    step: int | None = None,
    ema: bool = False,
    best: bool = False,
) -> torch.nn.Module:
    """Return the unsplit model of a run, in evaluation mode, on the CPU.

    The weights are those that the run ended with, or those of its newest complete checkpoint. Parameters are trained or
    frozen as the plan says. Names, shapes and dtypes are compared before anything is set, and checksums after. Random
    numbers of this process are as before.

    Args:
        run: Folder of the run.
        model: Module that gets the weights and is returned; for a run of a script, which has no factory to call. By
            default the plan's factory makes the model, as in the run. If it returns `Layers`, the result is their
            model; if it returns a list of stages, an `nn.Sequential` of them.
        plan: File of the plan or its folder, if the file that the run was begun with is not here any more.
        step: Step of the checkpoint. By default the end of the run, or the newest checkpoint.
        ema: Load the averages of the weights, which `optimizer.ema_decay` keeps.
        best: Load the checkpoint of the best evaluation, which a plan keeps with `evaluation.keep_best` and a script
            with `fit(best=...)`.

    Raises:
        ValueError: Both `step` and `best` are given.
        NoSuchRun: `run` is not the folder of a run.
        ModelRefused: The model cannot be made, or has other weights.
        WeightsUnusable: There are no weights yet, or no averages, or they are damaged.
    """
    folder = Path(run)
    if best and step is not None:
        raise ValueError(f"step = {step} and best = True name two checkpoints; give one of them")
    if not runs.is_run(folder):
        raise runs.NoSuchRun(runs.no_run(folder))
    try:
        place = None if plan is None else Path(plan)
        return run_model(folder, model=model, place=place, step=step, ema=ema, best=best).module
    except (NoCheckpoint, SnapshotDamaged) as error:
        raise WeightsUnusable(str(error)) from error


def run_model(
    folder: Path,
    *,
    model: Any = None,
    place: Path | None = None,
    step: int | None = None,
    ema: bool = False,
    best: bool = False,
    tell: Callable[[str], object] = log.warning,
) -> RunModel:
    """Return a run's model as `load` does, with its plan and stored weights.

    Args:
        folder: Folder of the run.
        model: Module that gets the weights; None has the plan's factory make it.
        place: File of the plan, or its folder.
        step: Step of the checkpoint; None takes the newest.
        ema: Load the averages of the weights.
        best: Load the checkpoint of the best evaluation, without a `step`.
        tell: Called if a run that goes on has deleted the checkpoint that was being read.

    Raises:
        NoCheckpoint: The run has no such checkpoint.
        SnapshotDamaged: A snapshot is damaged.
        ModelRefused: The model cannot be made, or has other weights.
        WeightsUnusable: There are no averages, or weights cannot be read.
    """
    source = source_in(folder)
    plan = planned(source, place) if model is None else source.plan
    made = _made(plan) if model is None else model
    module = _module_of(made)
    at_end = None if best else runs.result_in(folder)
    weights = take_weights(folder, step, partial(_fill, module, _origin(plan, model), at_end), tell, ema=ema, best=best)
    if plan.model.trainable is not None:
        _uncut(made, plan.model.trainable)
    return RunModel(source.run, made, module.cpu().eval(), plan, weights)


def _made(plan: Plan) -> Any:
    """Return the model that the plan's factory makes under the run's seed. Random generators are left as they were."""
    make = factory_of(plan)
    with generators_kept(torch.device("cpu")):
        torch.manual_seed(plan.run.seed)
        return make()


def _uncut(made: Any, trainable: Sequence[str] | None = None) -> list[Segment]:
    """Return the model as one stage, or as the list of stages that it is. Raises `ModelRefused`.

    With `trainable`, only parameters that it names are trained from now on.
    """
    stages = None if isinstance(made, list | tuple) else 1
    return cut_model(made, None, stages, trainable, accept_difference=True)  # no layer of it is called


def _module_of(made: Any) -> torch.nn.Module:
    """Return `made` as one module. Raises `ModelRefused` if it is not a model."""
    match made:
        case torch.nn.Module():
            return made
        case Layers():
            return made.model
        case list() | tuple():
            return torch.nn.Sequential(*made)
        case _:
            raise ModelRefused(
                f"the model is of type {type(made).__name__}; expected a torch module, or stageline.Layers"
            )


def _origin(plan: Plan, model: Any) -> str:
    return f'what model.factory = "{plan.model.factory}" returns' if model is None else "the model that was passed"


def _fill(module: torch.nn.Module, origin: str, at_end: runs.Result | None, weights: StoredWeights) -> None:
    """Set the weights of `module`. The weights of one file are in memory at a time.

    They are compared with those `at_end` of the run if they are of its last step.
    """
    late = {name: place for name, place in unset_buffers([("", module)]).items() if name in weights.forms}
    if faults := _misfits(module, weights, late):
        raise ModelRefused(
            f"{weights.title} are not those of {origin}: {listed(faults)}. If its code has changed since, load them "
            "with that of the run"
        )
    for name, (owner, key) in late.items():
        dtype, shape = weights.forms[name]
        owner._buffers[key] = torch.empty(shape, dtype=dtype)
    for file in weights.files:
        module.load_state_dict(weights.read_from(file, weights.names_in(file)), strict=False)
    if at_end is not None and weights.step == at_end.steps:
        _demand_result(module, at_end, weights)
    for file in weights.averages:
        module.load_state_dict(weights.averages_in(file), strict=False)


def _misfits(module: torch.nn.Module, weights: StoredWeights, late: Collection[str]) -> list[str]:
    """Return texts about wrong names, or else about wrong shapes and dtypes.

    Entries in `late` are taken as they are.
    """
    here = {name: value for name, value in module.state_dict().items() if isinstance(value, torch.Tensor)}
    forms = {name: (shape, dtype) for name, (dtype, shape) in weights.forms.items()}
    return list(misnamed(here, forms, {}, {*here, *late})) or list(misformed(here, forms))


def _demand_result(module: torch.nn.Module, result: runs.Result, weights: StoredWeights) -> None:
    """Raise `WeightsUnusable` if a finished run ended with other weights than `module` has now."""
    found = weights_sha256(tensor_digests(module.state_dict()))
    if found != result.weights_sha256:
        raise WeightsUnusable(
            f"{weights.title} are damaged: their weights_sha256 is {found[:12]}..., and the run ended with "
            f"{result.weights_sha256[:12]}.... Copy {', '.join(str(file) for file in weights.files)} again"
        )


def planned_layouts(plan: Plan) -> Sequence[StageLayout]:
    """Return the layouts of the stages of the plan's model.

    Raises:
        ModelRefused: The model cannot be made or cut.
        PlanRefused: The model has other stages than the plan says.
    """
    segments = build_segments(plan)
    plan.resolved(len(segments))
    return layouts_of(segments, optimizer_of(plan), groups_of(plan))


def layout_change(plan: Plan, folder: Path, step: int | None) -> Recut:
    """Return the change of a checkpoint's stages to those of `plan`.

    Args:
        plan: Plan with the new stages.
        folder: Folder of the run.
        step: Step of the checkpoint; None takes the newest that all stages have here.

    Raises:
        NoCheckpoint: The run has no such checkpoint.
        PlanRefused: The plan cannot work, or changes nothing.
        ModelRefused: The model cannot be made.
        SnapshotDamaged: A snapshot is damaged.
    """
    source = source_in(folder)
    found = source.step_of(step)
    layouts = planned_layouts(plan)
    plan = plan.resolved(len(layouts))
    if not needs_recut(plan, source):
        raise PlanRefused(
            [PlanError("", f"run {source.run} has this layout already: `stageline train --resume` goes on with it")]
        )
    absent = set(range(source.stages)) - source.present[found]
    contents = _contents(plan, source, absent) if absent else {}
    return Recut(source, found, plan, layouts, recut_id(source.run, found, plan), contents)


def _contents(plan: Plan, source: CheckpointSource, stages: set[int]) -> Mapping[int, Contents]:
    """Return the contents of the old `stages`, whose snapshots are elsewhere: as the model has them, cut as it was."""
    before = {"cut": source.plan.model.cut, "stages": source.plan.model.stages}
    old = plan.model_copy(update={"model": plan.model.model_copy(update=before), "workers": source.plan.workers})
    layouts: Sequence[StageLayout] = planned_layouts(old)
    return {stage: Contents(_forms(layouts[stage]), frozenset(layouts[stage].buffers)) for stage in stages}


def _forms(layout: StageLayout) -> Mapping[str, tuple[str, tuple[int, ...]]]:
    """Return dtype and shape of a stage's entries by name. Those of buffers are not known."""
    return {name: layout.forms.get(name, ("", ())) for name in layout.entries}


def planned_configuration(plan: Plan) -> Mapping[str, object]:
    """Return the configuration of the model that the plan's factory returns.

    Raises:
        ModelRefused: The model cannot be made.
        WeightsUnusable: The model has no configuration of transformers.
    """
    return configuration_of(factory_of(plan)(), f'model.factory = "{plan.model.factory}"')


def configuration_of(model: object, origin: str) -> Mapping[str, object]:
    """Return the transformers configuration of `model`, which comes from `origin`.

    Raises `WeightsUnusable` without one.
    """
    config = getattr(model, "config", None)
    if config is None or not hasattr(config, "to_json_string"):
        raise WeightsUnusable(
            f"{origin} returned an object of type {type(model).__name__} without a config of transformers: name a "
            f"folder with its config.json by --config FOLDER"
        )
    found = json.loads(config.to_json_string())  # values of JSON alone
    return {**found, "architectures": found.get("architectures") or [type(model).__name__]}
