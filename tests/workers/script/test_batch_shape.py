"""Values that are no batch are refused before anything is sent, and change nothing."""

from collections import OrderedDict
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from stageline import DataError, Line

X, Y = torch.ones(2, 4), torch.zeros(2, dtype=torch.int64)  # two rows: they could be unpacked as a pair


class TwoTensors(NamedTuple):
    one: torch.Tensor
    other: torch.Tensor


def line() -> Line:
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 3))
    sgd = partial(torch.optim.SGD, lr=0.1)
    return Line(layers, cut=[2], loss=functional.cross_entropy, optimizer=sgd, microbatches=2, workers="inline")


@pytest.mark.parametrize(
    ("batches", "got"),
    [
        ((X, Y), "batch 0 is of type Tensor. For one batch write [(x, y)]"),
        ([X], "batch 0 is of type Tensor. For one batch write [(x, y)]"),
        (X, "batch 0 is of type Tensor. For one batch write [(x, y)]"),
        ([(X, Y, Y)], "batch 0 is of type tuple with 3 entries. Several inputs are a tuple: bring ((x1, x2), y)"),
        ([(X, Y), {X}], "batch 1 is of type set. For one batch write [(x, y)]"),
        (TensorDataset(X, Y), "it got an object of type TensorDataset. Give stageline.Loader(dataset, batch_size="),
        (None, "it got None"),
    ],
)
def test_an_evaluation_and_a_fit_say_what_they_take_and_what_they_got(batches: Any, got: str) -> None:
    for taker, take in (("evaluate", line().evaluate), ("fit", line().fit)):
        with pytest.raises(DataError) as refused:
            take(batches)
        assert str(refused.value).startswith(f"{taker} takes an iterable of (x, y) batches, and {got}")


@pytest.mark.parametrize(
    ("x", "y", "told"),
    [
        (X, None, "there is no target: y is None"),
        (X, (1, {}), "there is no target: y is of type tuple with 2 entries"),
        (None, Y, "there is no input: x is None"),
        (TwoTensors(X, X), Y, r"x is of type TwoTensors with 2 entries \(pass tuple\(...\) of it\); expected a tensor"),
        ({"ids": OrderedDict(x=X)}, Y, r"x\['ids'\] is of type OrderedDict \(pass dict\(...\) of it\)"),
        (X, [Y, Y.numpy()], r"y\[1\] is of type ndarray \(pass torch.as_tensor\(...\) of it\)"),
        ({"ids": [[1, 2], [3, 4]]}, Y, r"x is of type dict without a tensor \(pass torch.as_tensor"),
        ({"ids": X, "mask": X[:1]}, Y, r"\{ids: float32 \[2, 4\], mask: float32 \[1, 4\]\} have no common number"),
        (
            torch.nested.nested_tensor([X[0], X[1, :2]], layout=torch.jagged),
            Y,
            "x is a nested tensor .*to_padded_tensor",
        ),
        (X, torch.zeros(3), "x has 2 rows and y has 3: no common number of rows"),
    ],
)
def test_a_step_with_what_is_no_batch_is_refused_and_changes_nothing(x: Any, y: Any, told: str) -> None:
    """It failed within the last stage, and the run with it."""
    refusing, other = line(), line()
    for call in (refusing.step, lambda x, y: refusing.evaluate([(x, y)])):
        with pytest.raises(DataError, match=told):
            call(x, y)
    assert refusing.position == 0
    assert refusing.step(X, Y) == other.step(X, Y)
    assert refusing.evaluate([[X, Y]]) == other.evaluate(iter([(X, Y)]))
