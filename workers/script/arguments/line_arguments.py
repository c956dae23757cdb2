"""The keyword arguments of a `Line` that goes on with a run, with their types: those of one that begins."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal, Required, TypedDict

import torch

from stageline.pipeline.stage.optimizer import OptimizerFactory
from stageline.pipeline.stage.precision import Autocast
from stageline.pipeline.stage.stage import Loss, LrSchedulerFactory

from .script_plan import Metric

Workers = Literal["processes", "inline"]


class LineArguments(TypedDict, total=False):
    """What they mean is at `Line`."""

    loss: Required[Loss]
    optimizer: Required[OptimizerFactory]
    lr_scheduler: LrSchedulerFactory | None
    lr_every: int
    clip_norm: float | None
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
    taps: Sequence[str] | None
