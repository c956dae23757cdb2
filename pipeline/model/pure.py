"""Which modules give a sample other outputs each time, or in another batch: so what they give cannot be kept by sample.

Only those of torch itself are known; what a user's module does shows in a trial.
"""

from collections.abc import Iterator, Sequence

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.modules.instancenorm import _InstanceNorm

from stageline.pipeline.stage.layers.layer import joined

from .segment import Segment

_EVAL = "call eval() on it in model.factory"


def impure_modules(segments: Sequence[Segment]) -> Iterator[str]:
    """Each with its name in the unsplit model, what it does, and the way out."""
    for part in segments:
        for name, module in part.parts:
            for inner, each in module.named_modules():
                if reason := _reason(each):
                    title = joined(name, inner) if inner else name
                    yield f"{title} of stage {part.index}, a {type(each).__name__}, {reason}"


def _reason(module: nn.Module) -> str:
    """Why what it gives does not follow from a sample alone; "" if it does, as far as is known."""
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
