"""Rows in memory give batches that follow from seed and step."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from stageline.pipeline.data import Rows
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
        (torch.zeros(3, 2), torch.zeros(4), 1, r"float32 \[3, 2\], float32 \[4\].*common number of rows"),
        (torch.zeros(3), torch.zeros(()), 1, r"float32 \[3\], float32 \[\].*common number of rows"),
        (None, "no tensors", 1, "no tensor is there, only NoneType, str"),
        (torch.zeros(0, 2), torch.zeros(0), 1, "0 rows"),
        (torch.zeros(3), torch.zeros(3), 0, "batch_size is 0"),
    ],
)
def test_data_that_makes_no_batches_is_refused(inputs: Tensor, targets: Tensor, batch_size: int, text: str) -> None:
    with pytest.raises(DataError, match=text):
        Rows(inputs, targets, batch_size, 0)
