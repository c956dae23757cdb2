"""A source gives batches that follow from seed and step; a feed cuts them into microbatches, then the held-out rows."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from stageline.pipeline.data import Feed, Rows, cut, rows, split_batch
from stageline.pipeline.errors import DataError
from stageline.pipeline.tree import Tree

counts = st.integers(1, 40)
sizes = st.integers(1, 12)
seeds = st.integers(0, 2**40)


def numbered(count: int, batch_size: int, seed: int = 0, *, shuffle: bool = True) -> Rows:
    """Row r is r everywhere, so that a batch shows which rows it holds."""
    numbers = torch.arange(count)
    inputs: dict[str, Tree] = {"pixels": numbers.float().reshape(-1, 1), "ids": (numbers, None)}
    return Rows(inputs, numbers, batch_size, seed, shuffle=shuffle)


def picked(source: Rows, step: int) -> list[int]:
    targets = source.batch(step)[1]
    assert isinstance(targets, Tensor)
    return targets.tolist()


def epoch(source: Rows, number: int) -> list[list[int]]:
    steps = source.steps_per_epoch
    return [picked(source, step) for step in range(number * steps, (number + 1) * steps)]


@given(counts, sizes, seeds, st.integers(0, 5))
def test_an_epoch_holds_every_row_once_and_only_its_last_batch_is_smaller(
    count: int, batch_size: int, seed: int, number: int
) -> None:
    batches = epoch(numbered(count, batch_size, seed), number)
    assert sorted(row for batch in batches for row in batch) == list(range(count))
    assert all(len(batch) == batch_size for batch in batches[:-1])
    assert 1 <= len(batches[-1]) <= batch_size


@given(counts, sizes, seeds, st.lists(st.integers(0, 200), max_size=8))
def test_any_machine_may_ask_for_any_step_in_any_order(
    count: int, batch_size: int, seed: int, steps: list[int]
) -> None:
    one, other = numbered(count, batch_size, seed), numbered(count, batch_size, seed)
    asked_in_disorder = {step: picked(one, step) for step in steps}
    assert asked_in_disorder == {step: picked(other, step) for step in sorted(steps)}


def test_epochs_and_seeds_are_shuffled_unlike_each_other() -> None:
    orders = [epoch(numbered(50, 50, seed), number)[0] for seed in (0, 1, 10) for number in (0, 1, 11)]
    assert len({tuple(order) for order in orders}) == len(orders)


def test_the_order_drawn_for_a_seed_is_the_one_it_always_was() -> None:
    assert epoch(numbered(10, 4, seed=40), 1) == [[4, 3, 5, 8], [0, 2, 9, 6], [1, 7]]


def test_without_shuffling_rows_come_in_their_order_in_every_epoch() -> None:
    source = numbered(10, 4, shuffle=False)
    assert epoch(source, 0) == epoch(source, 3) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]


@given(counts, sizes, seeds)
def test_all_tensors_of_a_batch_hold_the_same_rows_and_plain_values_stay(
    count: int, batch_size: int, seed: int
) -> None:
    inputs, targets = numbered(count, batch_size, seed).batch(3)
    match inputs, targets:
        case {"pixels": Tensor() as pixels, "ids": (Tensor() as ids, None)}, Tensor():
            assert torch.equal(ids, targets)
            assert torch.equal(pixels.reshape(-1), targets.float())
        case _:
            pytest.fail(f"the batch has another form than the data: {inputs}")


@pytest.mark.parametrize("shuffle", [True, False])
def test_the_global_random_generator_is_neither_read_nor_changed(shuffle: bool) -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    one = epoch(numbered(20, 3, shuffle=shuffle), 0)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    assert epoch(numbered(20, 3, shuffle=shuffle), 0) == one


def test_an_unshuffled_batch_is_a_view_and_costs_no_copy() -> None:
    data = torch.zeros(10, 2)
    inputs, _ = Rows(data, data, 4, 0, shuffle=False).batch(1)
    assert isinstance(inputs, Tensor)
    assert inputs.data_ptr() == data[4:].data_ptr()


def test_held_out_rows_come_back_as_they_were_given() -> None:
    data, kept = torch.zeros(3), (torch.ones(2), torch.ones(2))
    assert Rows(data, data, 1, 0).held_out() is None
    assert Rows(data, data, 1, 0, held_out=kept).held_out() is kept


@pytest.mark.parametrize(
    ("inputs", "targets", "batch_size", "text"),
    [
        (torch.zeros(3, 2), torch.zeros(4), 1, r"\(3, 2\), \(4,\).*common number of rows"),
        (torch.zeros(3), torch.zeros(()), 1, r"\(3,\), \(\).*common number of rows"),
        (None, "no tensors", 1, "no tensor is there, only NoneType, str"),
        (torch.zeros(0, 2), torch.zeros(0), 1, "0 rows"),
        (torch.zeros(3), torch.zeros(3), 0, "batch_size is 0"),
    ],
)
def test_data_that_makes_no_batches_is_refused(inputs: Tensor, targets: Tensor, batch_size: int, text: str) -> None:
    with pytest.raises(DataError, match=text):
        Rows(inputs, targets, batch_size, 0)


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


def test_held_out_rows_follow_the_training_steps_in_batches_of_the_same_size():
    assert feed().evaluation == range(3, 5)
    assert [feed().microbatch(4, microbatch).targets.tolist() for microbatch in range(2)] == [[104], []]


def test_a_step_beyond_the_run_is_refused():
    assert feed(held_out=None).evaluation == range(3, 3)
    with pytest.raises(DataError, match="step 3 is beyond the run's 3 steps, and no rows are held out"):
        feed(held_out=None).microbatch(3, 0)


def test_an_error_of_the_users_source_is_named_with_its_line():
    class Broken(Rows):
        def batch(self, step: int):
            raise KeyError("column")

    with pytest.raises(
        DataError, match=r"batch\(1\) failed: KeyError: 'column' \(/.*/test_data\.py, line \d+, in batch\)"
    ):
        Feed(Broken(DATA, DATA, 4, 0), 2, 3, 4).microbatch(1, 0)


def test_inputs_and_targets_must_have_the_same_rows():
    with pytest.raises(DataError, match="common number of rows"):
        cut(torch.zeros(4), torch.zeros(5), 2)
