"""Keeps an exponential moving average of weights, as `torch.optim.swa_utils.AveragedModel` with an EMA function does.

update    0                   n
average   the weight itself   average + (1 - decay) * (weight - average)

Of parameters that are trained; the average of one that is not is itself. Buffers are not averaged (torch's
`use_buffers=False`): with averages, a layer's buffers are as training has left them.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType

import torch
from torch.optim.swa_utils import get_ema_multi_avg_fn

from stageline.pipeline.errors import StageError
from stageline.pipeline.stage.layers.body import Body, Weights
from stageline.pipeline.stage.layers.memory import copied
from stageline.pipeline.tree import describe


class NoAverage:
    """Stands for the averages of stage number `stage`, which keeps none."""

    averages: Weights = MappingProxyType({})

    def __init__(self, stage: int) -> None:
        self._stage = stage

    @property
    def entries(self) -> Weights:
        """None."""
        return {}

    def demanded(self) -> "WeightAverage":
        """Raises `StageError`."""
        raise StageError(f"stage {self._stage} keeps no averages of its weights: set ema_decay")

    def update(self) -> None:
        """There is nothing to average."""

    def restore(self, entries: Mapping[str, torch.Tensor]) -> None:
        """Raises `ValueError` for averages."""
        if entries:
            raise ValueError("averages of weights are in the state only")


class WeightAverage(NoAverage):
    """The averages of the trained parameters of `body`, in memory that `copied` makes, from the first update on."""

    def __init__(self, body: Body, decay: float, copied: Callable[[torch.Tensor], torch.Tensor] = copied) -> None:
        self._body = body
        self._parameters = body.trainable()
        self._average = get_ema_multi_avg_fn(decay)  # type: ignore[no-untyped-call]
        self.averages = {}  # by the names in the body; nothing before the first update, when they are the weights
        self._copied = copied

    @property
    def entries(self) -> Weights:
        """Return the averages by the names of the unsplit model's `state_dict`, all that a parameter has there."""
        return self._body.entries_of(self.averages)

    def demanded(self) -> "WeightAverage":
        return self

    @contextmanager
    def in_place_of_weights(self) -> Iterator[None]:
        """A context in which parameters have the memory of their averages, so that whatever refers to a parameter
        computes with its average. Nothing is written, and autograd does not see it: graphs and versions that were there
        before go on as they are afterwards, when parameters have their own memory again, also after an exception."""
        own = {name: self._parameters[name].data for name in self.averages}
        try:
            for name, average in self.averages.items():
                self._parameters[name].data = average
            yield
        finally:
            for name, data in own.items():
                self._parameters[name].data = data

    def update(self) -> None:
        """To be called after each update of the weights."""
        weights = {name: parameter.detach() for name, parameter in self._parameters.items()}
        if not self.averages:
            self.averages = {name: self._copied(weight) for name, weight in weights.items()}
            return
        for names in _alike(weights):
            self._average([self.averages[name] for name in names], [weights[name] for name in names], 0)

    def restore(self, entries: Mapping[str, torch.Tensor]) -> None:
        """Goes on from these, as `entries` had them. Raises `ValueError` unless there is one for each parameter, of its
        shape and dtype, or none at all."""
        found = self._body.from_entries(entries)
        for name, parameter in self._parameters.items() if entries else ():
            given = found.get(name)
            if given is None or (given.shape, given.dtype) != (parameter.shape, parameter.dtype):
                title = self._body.by_unsplit_names({name: parameter})
                held = "missing" if given is None else describe(given)
                raise ValueError(f"the average of {next(iter(title))} is {held}, the weight is {describe(parameter)}")
        self.averages = {name: self._copied(found[name]).to(self._body.device) for name in self._parameters if entries}


def average_of(
    stage: int, body: Body, decay: float | None, copied: Callable[[torch.Tensor], torch.Tensor]
) -> NoAverage:
    """Return the averages of the weights of stage number `stage`, in memory that `copied` makes."""
    return NoAverage(stage) if decay is None else WeightAverage(body, decay, copied)


def _alike(weights: Weights) -> list[list[str]]:
    """The names of those of each dtype, which torch averages together."""
    found: dict[torch.dtype, list[str]] = {}
    for name, weight in weights.items():
        found.setdefault(weight.dtype, []).append(name)
    return list(found.values())
