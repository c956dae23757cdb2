"""Whether what is to be recomputed is there: layers, as `model.cut` has their names, and modules in them.

recompute = ["transformer.h.*.mlp"]     transformer.h.0.mlp, transformer.h.1.mlp, ... on whichever stages they are
"""

from collections.abc import Sequence

from stageline.pipeline.model_names import near, unmatched
from stageline.pipeline.plan import Plan
from stageline.pipeline.stage.recompute import WHOLE, recomputable

from .segments.segment import Segment


def demand_recomputable(plan: Plan, segments: Sequence[Segment]) -> None:
    """Raises `PlanRefused` for a pattern that matches no layer and no module that a layer calls."""
    wanted = plan.recompute
    if wanted is None or wanted == WHOLE:
        return
    names = [name for part in segments for name in recomputable(part.names, part.layers)]
    if wrong := unmatched(wanted, names):
        reasons = (f'no layer or module of one matches "{each}"; there are {near(each, names)}' for each in wrong)
        raise plan.refused("memory.recompute", "; ".join(reasons))
