"""A checkpoint, and the stages of another plan that are to go on from it. Calls the plan's factory."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from stageline.pipeline.model.stage_layout import StageLayout
from stageline.pipeline.plan import Plan, PlanError, PlanRefused
from stageline.workers.checkpoint.recut import Recut, needs_recut
from stageline.workers.checkpoint.regroup import Contents
from stageline.workers.checkpoint.source import CheckpointSource, source_in
from stageline.workers.runs.notes import recut_id

from .planned import planned_layouts


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
