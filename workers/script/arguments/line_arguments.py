"""The keyword arguments of a `Line`, with their types, for checkers; their defaults are those of `LineOptions`."""

from collections.abc import Mapping, Sequence
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import Any, Required, TypedDict

import torch

from stageline.pipeline.features.recompute import Recompute
from stageline.pipeline.stage.layers.loss import Autocast, Loss
from stageline.pipeline.stage.stage_update import LrSchedulerFactory, OptimizerFactory

from .script_plan import FeatureMaker, LineOptions, Metric, Model, Workers


class LineArguments(TypedDict, total=False):
    """What they mean is at `Line`."""

    loss: Required[Loss]
    optimizer: Required[OptimizerFactory]
    lr_scheduler: LrSchedulerFactory | None
    lr_every: int
    clip_norm: float | None
    ema_decay: float | None
    groups: Sequence[Mapping[str, object]] | None
    cut: Sequence[int | str] | None
    stages: int | None
    placement: Sequence[Sequence[int]] | None
    schedule: str
    microbatches: int
    accumulate: int
    window: Sequence[int] | None
    seed: int
    device: str | torch.device
    autocast: Autocast | None
    recompute: Recompute | None
    threads: int
    metrics: Sequence[Metric]
    workers: Workers
    broker: str | None
    name: str
    folder: str | Path
    settings: Mapping[str, object] | None
    progress: bool | None
    weights: str | Path | None
    trainable: Sequence[str] | None
    features: Sequence[FeatureMaker]
    taps: Sequence[str] | None
    accept_difference: bool


def options_of(arguments: LineArguments) -> LineOptions:
    """What a line was given, with defaults for the rest. Raises `TypeError` for an argument that there is not, or one
    that is missing."""
    given: Mapping[str, Any] = arguments
    try:
        return LineOptions(**{**given, "settings": given.get("settings") or {}})
    except TypeError as error:
        raise TypeError(str(error).replace(LineOptions.__name__, "Line")) from None


def line_signature() -> Signature:
    """How a `Line` is made, for help and for editors that ask Python: with every argument and its default."""
    model = Parameter("model", Parameter.POSITIONAL_OR_KEYWORD, annotation=Model)
    options = signature(LineOptions).parameters
    settings = options["settings"].replace(default=None)
    resume = Parameter("resume", Parameter.KEYWORD_ONLY, default=None, annotation=str | Path | None)
    return Signature([model, *({**options, "settings": settings}.values()), resume])
