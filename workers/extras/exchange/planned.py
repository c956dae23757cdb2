"""What a plan's model says of its stages and its configuration. Calls the user's factory."""

from collections.abc import Sequence
from typing import Any

from stageline.pipeline.model.cut import build_segments
from stageline.pipeline.model.load import base_folder, call, load_object
from stageline.pipeline.model.patterns import groups_of
from stageline.pipeline.model.plan_stage import optimizer_of
from stageline.pipeline.model.stage_layout import StageLayout, layouts_of
from stageline.pipeline.plan import Plan


def planned_layouts(plan: Plan) -> Sequence[StageLayout]:
    """The stages of the plan's model. Raises `ModelRefused`, or `PlanRefused` if it has others than the plan says."""
    segments = build_segments(plan)
    plan.resolved(len(segments))
    return layouts_of(segments, optimizer_of(plan), groups_of(plan))


def planned_model(plan: Plan) -> Any:
    """What the plan's factory returns. Raises `ModelRefused`."""
    factory = load_object(plan.model.factory, base_folder(plan), "model.factory")
    return call(factory, f'model.factory = "{plan.model.factory}"', **plan.model.options)
