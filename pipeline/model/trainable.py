"""Which parameters are trained: those whose names in the unsplit model match a pattern of `model.trainable`.

trainable = ["encoder.layer.40.*"]      encoder.layer.40.attention.weight is trained, all others are frozen
"""

from collections.abc import Iterable, Sequence

import torch

from stageline.pipeline.errors import ModelRefused
from stageline.pipeline.model_names import hint, matches, unmatched
from stageline.pipeline.stage.layers.layer import joined
from stageline.pipeline.tree import describe

from .segments.segment import Segment


def train_only(segments: Sequence[Segment], patterns: Sequence[str]) -> None:
    """Sets `requires_grad` of each parameter: True if one of its names in the unsplit model matches one of `patterns`
    (as `fnmatch.fnmatchcase` has them: `*` matches dots too), False otherwise. One that has several names, since
    several layers use it, is trained if any of them matches.

    Raises `ModelRefused` for a pattern that matches nothing, and for parameters that cannot be trained; nothing has
    changed then.
    """
    named = [(name, parameter) for part in segments for name, parameter in _named_parameters(part)]
    matching = {id(each): (name, each) for name, each in named if matches(name, patterns)}
    if wrong := [*_unmatched(patterns, [name for name, _ in named]), *_untrainable(matching.values())]:
        raise ModelRefused("; ".join(wrong))
    for _, parameter in named:
        parameter.requires_grad_(id(parameter) in matching)


def _named_parameters(part: Segment) -> Iterable[tuple[str, torch.nn.Parameter]]:
    for name, module in part.parts:
        for key, parameter in module.named_parameters(remove_duplicate=False):
            yield joined(name, key), parameter


def _unmatched(patterns: Sequence[str], names: Sequence[str]) -> Iterable[str]:
    for pattern in unmatched(patterns, names):
        yield f'model.trainable: no parameter of the model matches "{pattern}". {hint(pattern, names)}'


def _untrainable(matching: Iterable[tuple[str, torch.nn.Parameter]]) -> Iterable[str]:
    for name, parameter in matching:
        if not (parameter.is_floating_point() or parameter.is_complex()):
            yield (
                f"model.trainable: {name} is {describe(parameter)}, and only numbers with a fraction can be trained: "
                "leave it out of the patterns"
            )
