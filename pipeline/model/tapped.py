"""Which layers are tapped: those whose names, as `model.cut` has them, match a pattern of `taps.layers`.

layers = ["encoder.layer.4?"]      encoder.layer.40 to encoder.layer.49, on whichever stages they are
"""

from collections.abc import Sequence

from stageline.pipeline.model_names import matches, near, unmatched
from stageline.pipeline.plan import Plan

from .segments.segment import Segment


def tapped_layers(plan: Plan, segments: Sequence[Segment]) -> dict[int, tuple[str, ...]]:
    """The names of the tapped layers, by stage, in the model's order; stages without any are left out.

    Raises `PlanRefused` for a pattern that matches no layer.
    """
    if plan.taps is None:
        return {}
    patterns, names = plan.taps.layers, [name for part in segments for name in part.names]
    if wrong := unmatched(patterns, names):
        reasons = (f'no layer of the model matches "{each}"; {_hint(each, names)}' for each in wrong)
        raise plan.refused("taps.layers", "; ".join(reasons))
    found = {part.index: tuple(name for name in part.names if matches(name, patterns)) for part in segments}
    return {stage: layers for stage, layers in found.items() if layers}


def _hint(pattern: str, names: Sequence[str]) -> str:
    holder = next((name for name in names if pattern.startswith(f"{name}.")), None)
    if holder is not None:
        return f"it names a part of layer {holder}, and only what whole layers return is stored"
    return f"layers have names such as {near(pattern, names)}"
