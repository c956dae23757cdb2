"""The groups of parameters that a plan gives settings of the optimizer: `optimizer.groups`."""

from collections.abc import Mapping, Sequence

from stageline.pipeline.model_names import hint, unmatched
from stageline.pipeline.plan import Plan
from stageline.pipeline.stage.update.optimizer import ParameterGroup

from .segments.segment import Segment


def groups_of(plan: Plan) -> tuple[ParameterGroup, ...]:
    """As stages take them."""
    return tuple(map(_group, plan.optimizer.groups or ()))


def demand_matched(plan: Plan, segments: Sequence[Segment]) -> None:
    """Raises `PlanRefused` for a pattern that matches no parameter of the model."""
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
