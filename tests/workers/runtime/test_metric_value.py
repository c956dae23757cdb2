"""Values that a metric may return."""

import pytest
import torch

from stageline.workers.runtime.executor import metric_value

ROWS = torch.ones(4, 2)


@pytest.mark.parametrize("found", [0.5, torch.tensor(0.5), torch.tensor([0.5]), torch.tensor(0.5, dtype=torch.float64)])
def test_a_number_is_taken_as_it_is(found):
    assert metric_value(lambda outputs, targets: found, ROWS, ROWS) == 0.5


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (ROWS, r"float32 \[4, 2\]\. Take its mean\(\)"),
        ("good", "'good'$"),
        ("0.5", "'0.5'$"),
        (None, "None$"),
        ({"f1": 0.5}, r"\{'f1': 0\.5\}$"),
    ],
)
def test_what_is_no_number_is_named(found, said):
    with pytest.raises(ValueError, match=f"must return one number, the mean over rows; it returned {said}"):
        metric_value(lambda outputs, targets: found, ROWS, ROWS)
