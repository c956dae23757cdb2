"""Settings of a stage as one value: everything that most stages leave at its default."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from stageline.pipeline.features.offload import Offload
from stageline.pipeline.features.recompute import Recompute

from .layers.loss import Autocast
from .stage_update import LrSchedulerFactory, ParameterGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSettings:
    """The names, precision, learning rate and features of one stage.

    Args:
        names: Layers' names in the unsplit model; by default their numbers, from the stage's first layer on.
        order: Each parameter's number among those of the unsplit model, by name; by default in the layers' order.
        titles: Names by which the optimizer's groups know parameters, where these have others.
        seed: Seed of the generators that layers draw from: torch's default ones, which each forward seeds layer by
            layer.
        device: Device that holds the weights, and computes.
        lr_scheduler: Makes a learning rate scheduler from the optimizer.
        lr_every: Updates between two steps of that scheduler; 0 if each update is told, None to follow evaluations.
        groups: Settings of the optimizer for parameters by their names.
        stash_weights: True if a backward uses the weights that its forward used (PipeDream, SOSP'19, section 3.3).
        delay_weights: True if all microbatches of a step use the weights before the newest update (PipeDream-2BW,
            arXiv 2006.09503).
        clip_norm: Largest norm of all stages' gradients together: `norms` and `clip` go before each update.
        ema_decay: Decay of an exponential moving average of the weights, which each update ends with.
        autocast: "bf16" if forwards and the loss compute in that precision where torch's autocast does.
        recompute: Parts of a forward that backward runs again, with the same bits, so that less is kept: "stage",
            "layers", or patterns of the names of layers and of modules in them.
        offload: Scratch and files outside of the worker's memory, which have parts of the stage.
    """

    names: Sequence[str] = ()
    order: Mapping[str, int] = field(default_factory=dict)
    titles: Mapping[str, str] = field(default_factory=dict)
    seed: int = 0
    device: str | torch.device = "cpu"
    lr_scheduler: LrSchedulerFactory | None = None
    lr_every: int | None = 1
    groups: Sequence[ParameterGroup] = ()
    stash_weights: bool = False
    delay_weights: bool = False
    clip_norm: float | None = None
    ema_decay: float | None = None
    autocast: Autocast | None = None
    recompute: Recompute | None = None
    offload: Offload = field(default_factory=Offload)
