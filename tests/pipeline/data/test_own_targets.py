"""Inputs of one source with the targets of another."""

import pytest
import torch
from torch import Tensor

from stageline.pipeline.data import Rows
from stageline.pipeline.data.source import OwnTargets
from stageline.pipeline.errors import DataError

ROWS, LABELS = torch.randn(12, 3), torch.arange(12)


def rows(held_out: int = 4) -> Rows:
    kept = (ROWS[:held_out], LABELS[:held_out]) if held_out else None
    return Rows(ROWS, -LABELS, 5, seed=0, held_out=kept)


def labels(batch_size: int = 5, held_out: Tensor | None = LABELS[:4]) -> Rows:
    return Rows(LABELS, LABELS, batch_size, seed=0, held_out=None if held_out is None else (held_out, held_out))


def test_each_batch_has_the_inputs_of_one_and_the_targets_of_the_other() -> None:
    both = OwnTargets(rows(), labels())
    inputs, targets = both.batch(1)
    numbers = both.samples(1)
    assert torch.equal(inputs, ROWS[numbers])
    assert torch.equal(targets, LABELS[numbers])
    kept = both.held_out()
    assert kept is not None
    assert torch.equal(kept[1], LABELS[:4])


@pytest.mark.parametrize(
    ("targets", "reason"),
    [
        (labels(batch_size=3), "there are 3 batches in an epoch of inputs, and 4 in one of data.targets"),
        (labels(held_out=None), "held_out.. returns different things; both must hold the same back"),
    ],
)
def test_sources_that_cannot_go_together_are_refused(targets: Rows, reason: str) -> None:
    with pytest.raises(DataError, match=reason):
        OwnTargets(rows(), targets)
