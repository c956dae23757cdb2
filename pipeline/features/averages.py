"""Exponential moving averages of weights, as `torch.optim.swa_utils.AveragedModel` with an EMA function keeps them.

update    0                   n
average   the weight itself   average + (1 - decay) * (weight - average)

Only trained parameters are averaged; a parameter that is not trained is its own average. Buffers are not averaged
(torch's `use_buffers=False`): with averages, a layer's buffers are as training has left them.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType

import torch
from torch.optim.swa_utils import get_ema_multi_avg_fn

from stageline.pipeline.errors import StageError
from stageline.pipeline.stage.layers.body import Body, Weights
from stageline.pipeline.stage.layers.memory import copied
from stageline.pipeline.tree import describe


class NoAverage:
    """The absence of averages, on a stage that keeps none."""

    averages: Weights = MappingProxyType({})

    def __init__(self, stage: int) -> None:
        """Take the number of the stage, for errors."""
        self._stage = stage

    @property
    def entries(self) -> Weights:
        """The averages by name: an empty mapping."""
        return {}

    def demanded(self) -> "WeightAverage":
        """Raise `StageError`, since the stage keeps no averages."""
        raise StageError(f"stage {self._stage} keeps no averages of its weights: set ema_decay")

    @contextmanager
    def computing(self, *, ema: bool) -> Iterator[Iterable[torch.Tensor]]:
        """Return a context in which the averages are the weights, if `ema` is set; it gives those that are in use."""
        if not ema:
            yield ()
            return
        found = self.demanded()
        with found.in_place_of_weights():
            yield found.averages.values()

    def of_state(self, *, ema: bool) -> Weights:
        """Return the averages by the names of the unsplit model's `state_dict`, if `ema` is set."""
        return self.demanded().entries if ema else {}

    def update(self) -> None:
        """Do nothing: no weight is averaged."""

    def restore(self, entries: Mapping[str, torch.Tensor]) -> None:
        """Raise `ValueError` if `entries` has averages, since this stage keeps none."""
        if entries:
            raise ValueError("averages of weights are in the state only")


class WeightAverage(NoAverage):
    """The averages of the trained parameters of a stage. They exist from the first update on."""

    def __init__(self, body: Body, decay: float, copied: Callable[[torch.Tensor], torch.Tensor] = copied) -> None:
        """Prepare averages; none exists yet.

        Args:
            body: The layers whose trained parameters are averaged.
            decay: Decay of the moving average, from 0 to 1.
            copied: Copies a weight into the memory in which its average shall be.
        """
        self._body = body
        self._parameters = body.trainable()
        self._average = get_ema_multi_avg_fn(decay)  # type: ignore[no-untyped-call]
        self.averages = {}  # by the names in the body; nothing before the first update, when they are the weights
        self._copied = copied

    @property
    def entries(self) -> Weights:
        """The averages by the names of the unsplit model's `state_dict`: every name that a parameter has there."""
        return self._body.entries_of(self.averages)

    def demanded(self) -> "WeightAverage":
        """Return these averages."""
        return self

    @contextmanager
    def in_place_of_weights(self) -> Iterator[None]:
        """Return a context in which each parameter's memory is that of its average.

        Every reference to a parameter then computes with the average. Nothing is written, and autograd does not see the
        change: graphs and versions that existed before continue as they are afterwards, when parameters have their own
        memory again, also after an exception.
        """
        own = {name: self._parameters[name].data for name in self.averages}
        try:
            for name, average in self.averages.items():
                self._parameters[name].data = average
            yield
        finally:
            for name, data in own.items():
                self._parameters[name].data = data

    def update(self) -> None:
        """Add the present weights to the averages. Call this after each update of the weights."""
        weights = {name: parameter.detach() for name, parameter in self._parameters.items()}
        if not self.averages:
            self.averages = {name: self._copied(weight) for name, weight in weights.items()}
            return
        for names in _alike(weights):
            self._average([self.averages[name] for name in names], [weights[name] for name in names], 0)

    def restore(self, entries: Mapping[str, torch.Tensor]) -> None:
        """Continue from averages in the form of `entries`.

        Args:
            entries: The averages by the unsplit model's names; empty if there was no update yet.

        Raises:
            ValueError: `entries` is not empty, and a parameter has no average in it or one of another shape or dtype.
        """
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
    """Return the averages of the weights of one stage.

    Args:
        stage: Number of the stage, for errors.
        body: The stage's layers.
        decay: Decay of the moving average; None if no averages are kept.
        copied: Copies a weight into the memory in which its average shall be.
    """
    return NoAverage(stage) if decay is None else WeightAverage(body, decay, copied)


def _alike(weights: Weights) -> list[list[str]]:
    """Return the names of weights, grouped by dtype: torch averages the weights of one dtype together."""
    found: dict[torch.dtype, list[str]] = {}
    for name, weight in weights.items():
        found.setdefault(weight.dtype, []).append(name)
    return list(found.values())
