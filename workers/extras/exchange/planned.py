"""The stages and the configuration of a plan's model, made by the user's factory.

Stages of another plan can go on from a checkpoint; an exported model has a config.json.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from stageline.pipeline.model.cut import build_segments
from stageline.pipeline.model.load import factory_of
from stageline.pipeline.model.patterns import groups_of
from stageline.pipeline.model.plan_stage import optimizer_of
from stageline.pipeline.model.segment import layouts_of
from stageline.pipeline.model.stage_layout import StageLayout
from stageline.pipeline.plan import Plan, PlanError, PlanRefused
from stageline.workers.checkpoint.recut import Recut, needs_recut
from stageline.workers.checkpoint.regroup import Contents
from stageline.workers.checkpoint.source import CheckpointSource, source_in
from stageline.workers.runs.notes import recut_id

from .export import CONFIG
from .stored_weights import WeightsUnusable


def planned_layouts(plan: Plan) -> Sequence[StageLayout]:
    """The stages of the plan's model. Raises `ModelRefused`, or `PlanRefused` if it has others than the plan says."""
    segments = build_segments(plan)
    plan.resolved(len(segments))
    return layouts_of(segments, optimizer_of(plan), groups_of(plan))


def layout_change(plan: Plan, folder: Path, step: int | None) -> Recut:
    """From the checkpoint of `step` of the run in `folder`, by default the newest that all stages have here, to `plan`.

    Raises `NoCheckpoint`, `PlanRefused`, also for a plan that changes nothing, `ModelRefused`, or `SnapshotDamaged`.
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
    """Of the old `stages`, whose snapshots are elsewhere: as the model has them, cut as it was."""
    before = {"cut": source.plan.model.cut, "stages": source.plan.model.stages}
    old = plan.model_copy(update={"model": plan.model.model_copy(update=before), "workers": source.plan.workers})
    layouts: Sequence[StageLayout] = planned_layouts(old)
    return {stage: Contents(_forms(layouts[stage]), frozenset(layouts[stage].buffers)) for stage in stages}


def _forms(layout: StageLayout) -> Mapping[str, tuple[str, tuple[int, ...]]]:
    """Those of buffers are not known."""
    return {name: layout.forms.get(name, ("", ())) for name in layout.entries}


def read_configuration(path: Path) -> Mapping[str, object]:
    """Of a file, or of the config.json in a folder. Raises `WeightsUnusable`."""
    file = path / CONFIG if path.is_dir() else path
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise WeightsUnusable(f"--config {file} cannot be read: {error}") from error
    if not isinstance(found, dict):
        raise WeightsUnusable(f"--config {file} is no table of settings, as save_pretrained writes it")
    return found


def planned_configuration(plan: Plan) -> Mapping[str, object]:
    """Of the model that the plan's factory returns. Raises `ModelRefused`, or `WeightsUnusable` if it has none."""
    return configuration_of(factory_of(plan)(), f'model.factory = "{plan.model.factory}"')


def configuration_of(model: object, origin: str) -> Mapping[str, object]:
    """Of `model`, which comes from `origin`. Raises `WeightsUnusable` if it is not of transformers."""
    config = getattr(model, "config", None)
    if config is None or not hasattr(config, "to_json_string"):
        raise WeightsUnusable(
            f"{origin} returned a {type(model).__name__} without a config of transformers: name a folder with its "
            "config.json by --config"
        )
    found = json.loads(config.to_json_string())  # values of JSON alone
    return {**found, "architectures": found.get("architectures") or [type(model).__name__]}
