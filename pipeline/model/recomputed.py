"""Whether what is to be recomputed is there: layers, as `model.cut` has their names, and modules in them.

recompute = ["transformer.h.*.mlp"]     transformer.h.0.mlp, transformer.h.1.mlp, ... on whichever stages they are
"""

from collections.abc import Iterator, Sequence

from stageline.pipeline.model_names import near, unmatched
from stageline.pipeline.plan import Plan, PlanError, PlanRefused
from stageline.pipeline.stage.backward.recompute import recomputable

from .segments.segment import Segment


def demand_recomputable(plan: Plan, segments: Sequence[Segment]) -> None:
    """Raises `PlanRefused` for a pattern that matches no layer and no module that a layer calls."""
    tables = {f"stage.{name}": table.recompute for name, table in (plan.stage or {}).items()}
    wanted = {"memory": None if plan.memory is None else plan.memory.recompute, **tables}
    wrong: list[PlanError] = []
    for table, patterns in wanted.items():
        here = [part for part in segments if table in ("memory", f"stage.{part.index}")]
        if isinstance(patterns, tuple) and (reasons := list(_reasons(patterns, here))):
            wrong += plan.refused(f"{table}.recompute", "; ".join(reasons)).errors
    if wrong:
        raise PlanRefused(wrong)


def _reasons(patterns: Sequence[str], parts: Sequence[Segment]) -> Iterator[str]:
    names = [name for part in parts for name in recomputable(part.names, part.layers)]
    for pattern in unmatched(patterns, names):
        yield f'no layer or module of one matches "{pattern}"; there are {near(pattern, names)}'
