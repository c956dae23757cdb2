"""Rows of one sample are never trained on and tested on."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from stageline.workers.extras.recording.linear_probe import distinct, split_rows


@given(st.lists(st.integers(0, 2**40), min_size=1, max_size=60))
def test_each_row_is_in_one_part_and_all_rows_of_a_sample_in_the_same(samples: list[int]) -> None:
    rows = split_rows(torch.tensor(samples))
    parts = torch.stack([rows.fitted, rows.chosen, rows.tested])
    assert bool((parts.sum(0) == 1).all())
    assert torch.equal(rows.trained, ~rows.tested)
    of = {sample: parts[:, place].tolist() for place, sample in enumerate(samples)}
    assert all(of[sample] == parts[:, place].tolist() for place, sample in enumerate(samples))


def test_a_fifth_is_tested_and_the_same_in_every_run() -> None:
    rows = split_rows(torch.arange(5000))
    assert (int(rows.tested.sum()), int(rows.chosen.sum())) == (956, 1057)
    assert rows.tested.nonzero()[:5, 0].tolist() == [0, 7, 8, 9, 10]
    assert torch.equal(split_rows(torch.arange(5000).flip(0)).tested.flip(0), rows.tested)


def test_distinct_values_are_numbered_in_ascending_order() -> None:
    values, places = distinct(torch.tensor([7, -3, 7, 40]))
    assert (values, places.tolist()) == ([-3, 7, 40], [1, 0, 1, 2])
