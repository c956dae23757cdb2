"""The groups of parameters that a plan gives settings of the optimizer: `optimizer.groups`."""

from collections.abc import Sequence

from stageline.pipeline.plan import Plan
from stageline.pipeline.stage.optimizer import ParameterGroup

from .segment import Segment


def groups_of(plan: Plan) -> tuple[ParameterGroup, ...]:
    """As stages take them."""
    given = plan.optimizer.groups or ()
    return tuple(
        ParameterGroup(tuple(map(str, each["match"])), {key: each[key] for key in each if key != "match"})  # type: ignore[call-overload]  # a list of texts
        for each in given
    )


def demand_matched(plan: Plan, segments: Sequence[Segment]) -> None:
    """Raises `PlanRefused` for a pattern that matches no parameter of the model."""
    names = list(dict.fromkeys(title for part in segments for title in part.titles.values()))
    for place, group in enumerate(groups_of(plan)):
        for pattern in group.match:
            if not any(ParameterGroup((pattern,), {}).has(name) for name in names):
                raise plan.refused(
                    "optimizer.groups",
                    f'no parameter of the model matches "{pattern}" of group {place}; they are called '
                    f"{', '.join(names[:_SHOWN])}{', ...' if len(names) > _SHOWN else ''}",
                )


_SHOWN = 8  # names in an error
