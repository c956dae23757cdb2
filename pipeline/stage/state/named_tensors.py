"""The tensors of a stage by the unsplit model's names, and the optimizer that changes them."""

from collections.abc import Mapping

import torch

from stageline.pipeline.errors import StageError
from stageline.pipeline.stage.layers.body import Body, Weights
from stageline.pipeline.stage.layers.memory import copied
from stageline.pipeline.stage.update.average import WeightAverage
from stageline.pipeline.stage.update.update import StageUpdate


class NamedTensors:
    """Those of stage number `index`: of its `body`, which `update` changes."""

    def __init__(self, index: int, body: Body, update: StageUpdate) -> None:
        self.index = index
        self._body = body
        self._update = update

    @property
    def optimizer(self) -> torch.optim.Optimizer | None:
        """None without trainable parameters."""
        return self._update.optimizer

    @property
    def lr_scheduler(self) -> torch.optim.lr_scheduler.LRScheduler | None:
        """None without an optimizer."""
        return self._update.lr_scheduler

    @property
    def learning_rates(self) -> tuple[float, ...]:
        """Those of the optimizer's groups, for the next update; none without an optimizer."""
        groups = () if self.optimizer is None else self.optimizer.param_groups
        return tuple(float(group["lr"]) for group in groups if "lr" in group)

    def gradients(self) -> dict[str, torch.Tensor | None]:
        """The gradients added up since the last update, by the unsplit model's names; None for one that got none. They
        are the stage's own: nothing writes to them once `set_gradients` has been called."""
        return {name: each.grad for name, each in self._trained()}

    def set_gradients(self, gradients: Mapping[str, torch.Tensor | None]) -> None:
        """What the next update updates with."""
        for name, parameter in self._trained():
            parameter.grad = gradients[name]

    def state_dict(self, *, ema: bool = False) -> dict[str, torch.Tensor]:
        """Parameters and buffers by the unsplit model's names, with `ema` the averages in place of weights. The tensors
        are the stage's own, not copies. Raises `StageError` for averages on a stage that has none, and `ModelRefused`
        for a tensor that a forward has registered, or taken out."""
        self._body.demand_as_made()
        return {**self._body.weights(), **(self._averaging().entries if ema else {})}

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Loads what `state_dict` returns; averages stay, and the next update goes on from them. Raises torch's
        `RuntimeError`, which names what is missing or misshapen."""
        self._body.set_weights(state)

    @property
    def averages(self) -> Weights:
        """Of the trained parameters, by their names in `state_dict`; nothing before the first update, when they are the
        weights, and nothing without `ema_decay`."""
        return {} if self._update.average is None else self._update.average.entries

    def parameters(self) -> dict[str, torch.Tensor]:
        """Return the parameters by the unsplit model's names. The tensors are the stage's own, not copies."""
        return self._body.unsplit_parameters()

    def variables(self) -> dict[str, torch.Tensor]:
        """Parameters and buffers, with those that `state_dict` leaves out, by the unsplit model's names. The tensors
        are the stage's own, not copies."""
        return {**self._body.unsplit_buffers(), **self._body.weights()}

    def buffers(self) -> Weights:
        """Copies of the layers' buffers, by the unsplit model's names."""
        return {name: copied(buffer) for name, buffer in self._body.unsplit_buffers().items()}

    def set_buffers(self, buffers: Weights) -> None:
        """Restores what `buffers` returned. Does not write to unchanged buffers, since a graph may hold them."""
        now = self._body.unsplit_buffers()
        changed = (name for name, kept in buffers.items() if name not in now or not torch.equal(kept, now[name]))
        self._body.set_buffers({name: buffers[name] for name in changed})

    def _trained(self) -> list[tuple[str, torch.Tensor]]:
        return [(name, each) for name, each in self._body.unsplit_parameters().items() if each.requires_grad]

    def _averaging(self) -> WeightAverage:
        if self._update.average is None:
            raise StageError(f"stage {self.index} keeps no averages of its weights: make it with ema_decay")
        return self._update.average
