"""What is no batch is refused before anything is sent, and changes nothing."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from stageline import DataError, Line

X, Y = torch.ones(2, 4), torch.zeros(2, dtype=torch.int64)  # two rows: they could be unpacked as a pair


def line() -> Line:
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 3))
    sgd = partial(torch.optim.SGD, lr=0.1)
    return Line(layers, cut=[2], loss=functional.cross_entropy, optimizer=sgd, microbatches=2, workers="inline")


@pytest.mark.parametrize(
    ("batches", "got"),
    [
        ((X, Y), "a tuple of 2, whose element 0 is a Tensor"),
        ([X], "a list of 1, whose element 0 is a Tensor"),
        (X, "a Tensor, whose element 0 is a Tensor"),
        ([(X, Y, Y)], "a list of 1, whose element 0 is a tuple of 3"),
        ([(X, Y), {X}], "a list of 2, whose element 1 is a set"),
        (None, "None"),
    ],
)
def test_an_evaluation_says_what_it_takes_and_what_it_got(batches: Any, got: str) -> None:
    with pytest.raises(DataError) as refused:
        line().evaluate(batches)
    wanted = "evaluate takes an iterable of (x, y) batches, and it got"
    assert str(refused.value) == f"{wanted} {got}. For one batch write [(x, y)] [SL202]"


@pytest.mark.parametrize(
    ("x", "y", "told"),
    [
        (X, None, "there is no target: y is None"),
        (X, (1, {}), "there is no target: y is a tuple of 2"),
        (None, Y, "there is no input: x is None"),
    ],
)
def test_a_step_without_a_tensor_is_refused_and_changes_nothing(x: Any, y: Any, told: str) -> None:
    """It failed within the last stage, and the run with it."""
    refusing, other = line(), line()
    for call in (refusing.step, lambda x, y: refusing.evaluate([(x, y)])):
        with pytest.raises(DataError, match=told):
            call(x, y)
    assert refusing.position == 0
    assert refusing.step(X, Y) == other.step(X, Y)
    assert refusing.evaluate([[X, Y]]) == other.evaluate(iter([(X, Y)]))
