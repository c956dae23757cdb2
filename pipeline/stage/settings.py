"""Settings of a stage as one value: everything that most stages leave at its default."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from stageline.pipeline.features.averages import average_of
from stageline.pipeline.features.offload import Offload
from stageline.pipeline.features.recompute import Recompute

from .layers.body import Body
from .layers.loss import Autocast
from .layers.memory import copied
from .stage_update import (
    LrSchedulerFactory,
    OptimizerFactory,
    ParameterGroup,
    StageUpdate,
    UpdatedFiles,
    demand_steps,
    make_optimizer,
)


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

    def update(
        self,
        index: int,
        body: Body,
        trainable: Mapping[str, torch.Tensor],
        optimizer: OptimizerFactory | None,
        note: Callable[[str], object],
    ) -> StageUpdate:
        """Return the update of a stage, with its optimizer, scheduler and averages.

        Args:
            index: Number of the stage.
            body: Layers of the stage.
            trainable: Parameters that are trained, by name.
            optimizer: Makes the optimizer; None for a stage that trains nothing.
            note: Called with what is done, for the text of an error.

        Raises:
            ModelRefused: The optimizer, the scheduler or a group cannot be used.
        """
        made = None if optimizer is None else make_optimizer(optimizer, trainable, self.groups)
        scheduler = None if self.lr_scheduler is None or made is None else self.lr_scheduler(made)
        demand_steps(scheduler, self.lr_every)
        weight_files, files = self.offload.weight_files, self.offload.files
        average = average_of(index, body, self.ema_decay, copied if weight_files is None else weight_files.copied)
        updated = None if files is None else UpdatedFiles(files, state=self.offload.optimizer)
        return StageUpdate(made, scheduler, self.lr_every, average, updated, note)
