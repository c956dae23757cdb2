"""Microbatches have the samples of their rows."""

import pytest
import torch

from stageline.pipeline.data import Numbering, Rows, split_batch


@pytest.mark.parametrize(("microbatches", "accumulate"), [(1, 1), (3, 1), (2, 2)])
def test_samples_are_cut_as_the_rows_of_their_batch(microbatches: int, accumulate: int) -> None:
    ids = torch.arange(22)
    source = Rows(ids, ids, 4, seed=3)
    numbering = Numbering(source.samples, microbatches, accumulate)
    for step in range(4):
        batches = [source.batch(step * accumulate + place)[0] for place in range(accumulate)]
        for number, rows in enumerate(part for batch in batches for part in split_batch(batch, microbatches)):
            assert torch.equal(numbering.microbatch(step, number), rows)


def test_there_is_room_for_the_highest_number_of_some_steps() -> None:
    numbering = Numbering(lambda batch: torch.tensor([batch, 10 - batch]), 1)
    assert [numbering.count(steps) for steps in (0, 1, 3)] == [0, 11, 11]
    assert [each.tolist() for each in numbering.batches(2)] == [[0, 10], [1, 9]]
