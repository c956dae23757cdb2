"""Features for a probe, of layers of any number of dimensions."""

import pytest
import torch

from stageline.workers.extras.recording.linear_probe import Pool, features_of, pooled
from stageline.workers.extras.recording.reading import Activations, TappedMicrobatch, TapsUnusable

X = torch.arange(2 * 3 * 4 * 5, dtype=torch.float64).reshape(2, 3, 4, 5)


def microbatch(activations: Activations) -> TappedMicrobatch:
    return TappedMicrobatch(3, 1, False, activations, None, None)


@pytest.mark.parametrize(
    ("dimensions", "pool", "wanted"),
    [
        (1, None, X[:, 0, 0, :1]),
        (2, Pool.MEAN, X[:, 0, 0]),
        (3, None, X[:, 0].mean(1)),
        (3, Pool.MEAN, X[:, 0].mean(1)),
        (3, Pool.LAST, X[:, 0, -1]),
        (3, Pool.FLATTEN, X[:, 0].flatten(1)),
        (4, None, X.flatten(1)),
        (4, Pool.MEAN, X.mean((1, 2))),
        (4, Pool.LAST, X[:, -1].flatten(1)),
    ],
)
def test_dimensions_between_rows_and_the_last_are_pooled(
    dimensions: int, pool: Pool | None, wanted: torch.Tensor
) -> None:
    tensor = {1: X[:, 0, 0, 0], 2: X[:, 0, 0], 3: X[:, 0], 4: X}[dimensions]
    assert torch.equal(pooled(tensor, pool), wanted)


def test_tensors_side_by_side_are_one_row_and_what_has_no_fraction_or_no_rows_is_left_out() -> None:
    tree = {"[0]": X[:, 0, 0].bfloat16(), "[1]": torch.ones(2, dtype=torch.bool), "[2]": X[:, 0, :, 0], "[3]": X[:1]}
    found = features_of("a", microbatch(tree), None)
    assert torch.equal(found, torch.cat([X[:, 0, 0].bfloat16().double(), X[:, 0, :, 0]], 1))


@pytest.mark.parametrize(
    ("activations", "reason"),
    [
        (torch.ones(2, 3, dtype=torch.int64), "layer a returned no tensor of numbers with a fraction"),
        (torch.tensor([[1.0], [float("nan")]]), "numbers that are not finite for microbatch 1 of step 3"),
    ],
)
def test_what_no_probe_can_be_trained_on_is_named(activations: torch.Tensor, reason: str) -> None:
    with pytest.raises(TapsUnusable, match=f"{reason}.*--layers"):
        features_of("a", microbatch(activations), None)
