"""Information about labels in gradients."""

import pytest
import torch

from stageline.workers.extras.audit.measures import area, told_by_direction, told_by_norm

LABELS = torch.tensor([0, 1, 0, 1, 0, 1])


@pytest.mark.parametrize(
    ("scores", "wanted"),
    [([0.1, 0.9, 0.2, 0.8, 0.3, 0.7], 1.0), ([0.9, 0.1, 0.8, 0.2, 0.7, 0.3], 0.0), ([1.0] * 6, 0.5)],
)
def test_the_area_is_the_share_of_pairs_in_order(scores: list[float], wanted: float) -> None:
    assert area(torch.tensor(scores), LABELS == 1) == wanted


def test_the_area_of_any_scores_is_that_of_counting_pairs() -> None:
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        scores = torch.randint(0, 4, [30], generator=generator).double()
        positive = torch.rand(30, generator=generator) < 0.4
        ours, theirs = scores[positive], scores[~positive]
        pairs = (ours[:, None] > theirs).double() + (ours[:, None] == theirs).double() / 2
        assert area(scores, positive) == pytest.approx(float(pairs.mean()))


def test_gradients_of_opposite_directions_tell_labels_and_equal_norms_do_not() -> None:
    gradients = torch.where(LABELS == 1, 1.0, -1.0)[:, None] * torch.ones(6, 3)
    assert told_by_direction(gradients, LABELS) == 1.0
    assert told_by_norm(gradients, LABELS) == 0.5
    assert told_by_norm(gradients * torch.where(LABELS == 1, 5.0, 1.0)[:, None], LABELS) == 1.0


def test_where_all_rows_are_of_one_class_nothing_can_be_told() -> None:
    assert told_by_norm(torch.randn(4, 2), torch.zeros(4, dtype=torch.int64)) is None
    assert told_by_direction(torch.randn(2, 2), torch.tensor([0, 1])) is None
