"""The loop that the runs must equal, in plain torch over the unsplit model, without anything of stageline but its data.

It adds the gradients of a step's microbatches in groups: those of a group in ascending order, then the groups' sums.
One group of all microbatches is the ordinary loop. Two replicas have the groups 0, 2, 4, ... and 1, 3, 5, ...
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce

import data
import model
import torch
from torch import Tensor, nn

SEED, LEARNING_RATE = 0, 0.02  # as in stageline.toml


@dataclass(frozen=True)
class PlainResult:
    """The weights after the last step, and losses by step."""

    weights: dict[str, Tensor]
    losses: dict[int, float]


def train(steps: int, groups: Sequence[Sequence[int]], microbatches: int) -> PlainResult:
    """Each group has the numbers of its microbatches, from 0. A step's loss is the sum of the microbatches' parts."""
    torch.manual_seed(SEED)
    network = model.build()
    optimizer = torch.optim.SGD(network.parameters(), lr=LEARNING_RATE)
    source = data.batches(data.ROWS, SEED)
    losses: dict[int, float] = {}
    for step in range(steps):
        points, classes = source.batch(step)
        assert isinstance(points, Tensor)
        assert isinstance(classes, Tensor)
        slices = zip(points.tensor_split(microbatches), classes.tensor_split(microbatches), strict=True)
        found = [_loss(network, *each) * (len(each[0]) / len(points)) for each in slices]
        losses[step] = reduce(torch.add, [loss.detach() for loss in found]).item()
        _set_gradients(network, found, groups)
        optimizer.step()
    return PlainResult(dict(network.state_dict()), losses)


def _loss(network: nn.Module, points: Tensor, classes: Tensor) -> Tensor:
    return nn.functional.binary_cross_entropy(network(points), classes)


def _set_gradients(network: nn.Module, losses: Sequence[Tensor], groups: Sequence[Sequence[int]]) -> None:
    parameters = list(network.parameters())
    gradients = [torch.autograd.grad(loss, parameters) for loss in losses]
    for number, parameter in enumerate(parameters):
        sums = [reduce(torch.add, [gradients[each][number] for each in group]) for group in groups]
        parameter.grad = reduce(torch.add, sums)
