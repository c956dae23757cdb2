"""A batch is cut as `torch.tensor_split` cuts, and the shares of its microbatches add up."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from stageline.pipeline.data import cut, joined_outputs, rows, split_batch
from stageline.pipeline.errors import DataError


@given(st.integers(0, 30), st.integers(1, 12))
def test_microbatches_are_the_slices_of_tensor_split(count: int, microbatches: int) -> None:
    wide, flat = torch.arange(count * 3).reshape(count, 3), torch.arange(count)
    pieces = split_batch({"wide": wide, "more": [flat, 7]}, microbatches)
    assert len(pieces) == microbatches
    for number, piece in enumerate(pieces):
        match piece:
            case {"wide": Tensor() as x, "more": [Tensor() as y, 7]}:
                assert torch.equal(x, wide.tensor_split(microbatches)[number])
                assert torch.equal(y, flat.tensor_split(microbatches)[number])
            case _:
                pytest.fail(f"the microbatch has another form than the batch: {piece}")


def test_ten_rows_in_four_microbatches() -> None:
    assert [rows(piece) for piece in split_batch(torch.zeros(10, 2), 4)] == [3, 3, 2, 2]


def test_more_microbatches_than_rows_leaves_the_last_ones_empty() -> None:
    assert [rows(piece) for piece in split_batch((torch.zeros(2), torch.zeros(2, 5)), 4)] == [1, 1, 0, 0]


@given(st.integers(1, 40), st.integers(1, 12))
def test_counted_losses_add_up_to_the_mean_over_the_batch(count: int, microbatches: int) -> None:
    batch = torch.rand(count, dtype=torch.float64, generator=torch.Generator().manual_seed(count))
    counted = [
        piece.share * piece.inputs.mean()
        for piece in cut(batch, batch, microbatches)
        if isinstance(piece.inputs, Tensor) and piece.rows
    ]
    torch.testing.assert_close(torch.stack(counted).sum(), batch.mean())


def test_the_share_of_nothing_in_an_empty_batch_is_one() -> None:
    assert [each.share for each in cut(torch.zeros(0), torch.zeros(0), 2)] == [1, 1]
    assert [each.share for each in cut(torch.zeros(1), torch.zeros(1), 2)] == [1, 0]


def test_inputs_and_targets_must_have_the_same_rows():
    with pytest.raises(DataError, match="common number of rows"):
        cut(torch.zeros(4), torch.zeros(5), 2)


def test_outputs_of_microbatches_are_joined_by_rows_or_refused_with_the_leaf_and_a_way_out() -> None:
    logits = [torch.ones(2, 3), torch.zeros(1, 3)]
    joined = joined_outputs([{"logits": each, "kind": "a"} for each in logits])
    assert isinstance(joined, dict)
    assert torch.equal(joined["logits"], torch.cat(logits))  # type: ignore[arg-type]
    assert joined["kind"] == "a"
    with pytest.raises(DataError, match=r"output\['loss'\] is float32 \[\] for the microbatches .*if self.training"):
        joined_outputs([{"logits": each, "loss": each.sum()} for each in logits])
    with pytest.raises(DataError, match=r"output\[1\] is float32 \[2, 2\], float32 \[1, 1\] for the microbatches"):
        joined_outputs([(each, each @ each.T) for each in logits])
