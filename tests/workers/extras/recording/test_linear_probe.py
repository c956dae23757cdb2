"""Linear probes tell what a linear function can, choose their penalty, and are the same each time."""

import torch
from torch import Tensor

from stageline.workers.extras.recording.linear_probe import (
    PENALTIES,
    ProbeRows,
    probe_classes,
    probe_numbers,
    split_rows,
)

ROWS = 400


def features(width: int = 5, seed: int = 0) -> Tensor:
    return torch.randn(ROWS, width, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def rows() -> ProbeRows:
    return split_rows(torch.arange(ROWS))


def test_classes_that_a_linear_function_separates_are_told() -> None:
    x = features()
    y = (x @ torch.randn(5, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))).argmax(1)
    score = probe_classes(x, y, rows())
    assert score.score > 0.93
    assert 0.3 < score.baseline < 0.6


def test_classes_that_have_nothing_to_do_with_the_features_are_not() -> None:
    y = torch.randint(2, (ROWS,), generator=torch.Generator().manual_seed(2))
    assert probe_classes(features(), y, rows()).score < 0.65


def test_the_scale_of_a_feature_and_one_that_does_not_vary_make_no_difference() -> None:
    x = features()
    y = (x[:, 0] + x[:, 1] > 0).long()
    scaled = x * torch.tensor([1e6, 1e-6, 1, 1, 1], dtype=torch.float64) + 7
    scaled[:, 4] = 3.0
    alone = x.clone()
    alone[:, 4] = 0.0
    assert probe_classes(scaled, y, rows()).score == probe_classes(alone, y, rows()).score > 0.95


def test_the_baseline_is_the_class_that_is_most_frequent_where_it_is_trained() -> None:
    y = torch.zeros(ROWS, dtype=torch.int64)
    split = rows()
    y[split.tested] = 1
    y[split.fitted.nonzero()[:10]] = 1
    assert probe_classes(features(), y, split).baseline == 0.0


def test_numbers_are_told_with_fewer_and_with_more_features_than_rows() -> None:
    for width in (5, 2 * ROWS):
        x = features(width)
        y = 3 + x[:, :5] @ torch.randn(5, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
        score = probe_numbers(torch.cat([x[:, :5], x[:, :5]], 1) if width == 5 else x, y, rows())
        assert score.score > (0.99 if width == 5 else 0.1)
        assert score.baseline <= 0


def test_noise_takes_the_stronger_penalty() -> None:
    y = torch.randn(ROWS, 1, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
    assert probe_numbers(features(200), y, rows()).l2 == PENALTIES[0]
    x = features()
    assert probe_numbers(x, x[:, :1], rows()).l2 == PENALTIES[-1]


def test_it_is_the_same_each_time() -> None:
    x = features()
    y = torch.randint(3, (ROWS,), generator=torch.Generator().manual_seed(2))
    torch.manual_seed(1)
    first = probe_classes(x, y, rows())
    torch.manual_seed(2)
    assert probe_classes(x, y, rows()) == first
