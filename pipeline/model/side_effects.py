"""Modules of torch that do more than compute a sample's outputs from that sample.

counts statistics     replicas of a stage, each with its own, would come to differ
draws, or looks at    the outputs differ each time or in another batch, so a prefix cache cannot keep them by sample
other rows

Only modules of torch itself are known; effects of a user's module show in a trial.
"""

from collections.abc import Iterator, Sequence

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.modules.instancenorm import _InstanceNorm

from stageline.pipeline.plan import Plan, PlanError
from stageline.pipeline.stage.layers.layer import joined

from .segment import Segment
from .ties import ties_of

_EVAL = "call eval() on it in model.factory"


def demand_replicable(plan: Plan, segments: Sequence[Segment]) -> None:
    """Raise `PlanRefused` if a stage with replicas has a module that counts statistics, or any stages share parameters.

    Only plans with replicas are refused.
    """
    plan.demand_none(
        PlanError(f"stage.{part.index}.replicas", reason)
        for part in segments
        if plan.stage_plan(part.index).replicas > 1
        for reason in (*_tied(segments), *_counting(part))
    )


def _tied(segments: Sequence[Segment]) -> Iterator[str]:
    for stages in ties_of(segments):
        yield (
            f"stages {stages[0]} and {stages[1]} share a parameter, whose gradients are not added over replicas; leave "
            "replicas out, or cut so that all layers that use it are in one stage"
        )


def _counting(part: Segment) -> Iterator[str]:
    for title, each in _modules(part):
        if isinstance(each, _NormBase) and each.training and each.track_running_stats:
            yield (
                f"{title}, of type {type(each).__name__}, counts statistics of the microbatches that it sees, and each "
                f"replica sees others; {_EVAL}, or use LayerNorm or GroupNorm"
            )


def _modules(part: Segment) -> Iterator[tuple[str, nn.Module]]:
    """Yield all modules of a segment, with their names in the unsplit model."""
    for name, module in part.parts:
        yield from ((joined(name, inner) if inner else name, each) for inner, each in module.named_modules())


def impure_modules(segments: Sequence[Segment]) -> Iterator[str]:
    """Yield a text for each module whose outputs do not follow from a sample alone.

    The text has the module's name in the unsplit model, what the module does, and the way out.
    """
    for part in segments:
        for title, each in _modules(part):
            if reason := _reason(each):
                yield f"{title} of stage {part.index}, of type {type(each).__name__}, {reason}"


def _reason(module: nn.Module) -> str:
    """Return why the outputs of `module` do not follow from a sample alone; "" if they do, as far as is known."""
    match module:
        case _DropoutNd() if module.training and module.p > 0:
            return f"is in training mode and draws with p = {module.p:g}; {_EVAL}"
        case nn.MultiheadAttention() | nn.RNNBase() if module.training and module.dropout > 0:
            return f"is in training mode and draws with dropout = {module.dropout:g}; {_EVAL}"
        case nn.RReLU() if module.training:
            return f"is in training mode and draws; {_EVAL}"
        case _BatchNorm() if module.training:
            return f"is in training mode and computes with the other rows of its microbatch; {_EVAL}"
        case _BatchNorm() if module.running_mean is None:
            return "has no statistics of its own and computes with the other rows of its microbatch; give it some"
        case _InstanceNorm() if module.training and module.track_running_stats:
            return f"is in training mode and counts its statistics; {_EVAL}"
    return ""
