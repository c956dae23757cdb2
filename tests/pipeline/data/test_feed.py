"""A feed cuts a source's batches into microbatches, then the rows held out."""

import pytest
import torch

from stageline.pipeline.data import Feed, Rows, cut
from stageline.pipeline.errors import DataError

DATA = torch.arange(10)
HELD_OUT = (torch.arange(100, 105), torch.arange(100, 105))


def feed(steps: int = 3, held_out=HELD_OUT) -> Feed:
    return Feed(Rows(DATA, DATA, 4, 0, shuffle=False, held_out=held_out), 2, steps, 4)


def test_a_microbatch_knows_its_rows_and_its_share_of_the_batch():
    one, other = feed().microbatch(2, 0), feed().microbatch(2, 1)
    assert (one.inputs.tolist(), other.inputs.tolist()) == ([8], [9])
    assert (one.rows, one.share) == (1, 0.5)
    assert [each.rows for each in cut(torch.zeros(5), torch.zeros(5), 2)] == [3, 2]
    assert [each.share for each in cut(torch.zeros(5), torch.zeros(5), 2)] == [0.6, 0.4]


def test_rows_held_out_come_in_batches_of_the_same_size_in_every_round():
    assert feed().batches_held_out == 2
    for batch in (1, 3, 5):
        found = [feed().held_out_microbatch(batch, microbatch) for microbatch in range(2)]
        assert [each.targets.tolist() for each in found] == [[104], []]


def test_a_source_that_holds_nothing_back_has_no_batch_to_evaluate():
    assert feed(held_out=None).batches_held_out == 0
    with pytest.raises(DataError, match="batch 3 cannot be evaluated: no rows are held out"):
        feed(held_out=None).held_out_microbatch(3, 0)


def test_an_error_of_the_users_source_is_named_with_its_line():
    class Broken(Rows):
        def batch(self, step: int):
            raise KeyError("column")

    with pytest.raises(
        DataError, match=r"batch\(1\) failed: KeyError: 'column' \(/.*/test_feed\.py, line \d+, in batch\)"
    ):
        Feed(Broken(DATA, DATA, 4, 0), 2, 3, 4).microbatch(1, 0)


def test_a_source_of_rows_held_out_is_asked_for_its_batches_when_their_turn_comes():
    held_out = Rows(HELD_OUT[0], HELD_OUT[1], 2, 0, shuffle=False)
    fed = feed(held_out=held_out)
    assert fed.batches_held_out == 3
    assert [fed.held_out_microbatch(5, microbatch).targets.tolist() for microbatch in range(2)] == [[104], []]
    assert fed.held_out_sample[1].tolist() == [100, 101]
    assert feed().held_out_sample is HELD_OUT
