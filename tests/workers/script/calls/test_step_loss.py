"""The loss that a step returns."""

import math

import pytest

from stageline.workers.errors import RunFailed
from stageline.workers.script.calls.calls import StepLoss


def test_its_value_is_waited_for_once_and_not_before_it_is_read():
    waits = []

    def wait() -> tuple[float, float]:
        waits.append(1)
        return 0.25, 4.0

    loss = StepLoss(wait)
    assert not waits
    assert (loss.item(), float(loss), f"{loss:.3f}", str(loss), repr(loss)) == (
        0.25,
        0.25,
        "0.250",
        "0.25",
        "StepLoss(0.25)",
    )
    assert loss.gradient_norm == 4.0
    assert len(waits) == 1


def test_it_compares_as_its_value_does():
    low, high = StepLoss(lambda: (0.25, None)), StepLoss(lambda: (0.5, None))
    assert low == 0.25
    assert low == StepLoss(lambda: (0.25, 3.0))
    assert low != high
    assert low < high
    assert high > 0.25
    assert sorted([high, low], key=float) == [low, high]


def test_a_batch_without_rows_has_none():
    loss = StepLoss(lambda: (None, None))
    assert loss.item() is None
    assert math.isnan(float(loss))
    assert str(loss) == "None"


def test_reading_it_raises_what_the_step_raised_each_time(tmp_path):
    def fails() -> tuple[float, None]:
        raise RunFailed("worker 1 is lost", 1, tmp_path)

    loss = StepLoss(fails)
    for _ in range(2):
        with pytest.raises(RunFailed, match="worker 1 is lost"):
            loss.item()
