"""A loader gives the batches of a dataset, in the order of `Rows`, the same whichever process draws them."""

import random
from collections.abc import Iterator
from itertools import islice

import numpy as np
import psutil
import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, TensorDataset

from stageline.pipeline.data import Rows
from stageline.pipeline.data.loader import Loader
from stageline.pipeline.errors import DataError
from stageline.pipeline.tree import tensors

X, Y = torch.arange(30.0).reshape(10, 3), torch.arange(10)


class Augmented(Dataset):
    """Ten rows, each with noise of torch, numpy and `random`."""

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return X[index] + torch.rand(3) + np.random.rand() + random.random(), index


class Endless(IterableDataset):
    def __iter__(self) -> Iterator[Tensor]:
        return iter(X)


class WithoutLength(Dataset):
    def __getitem__(self, index: int) -> Tensor:
        return X[index]


class OneBroken(Augmented):
    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return {}[index] if index == 7 else super().__getitem__(index)


class Unequal(Augmented):
    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.zeros(4 if index == 7 else 3), index


def loader(dataset: object = None, **options: object) -> Loader:
    return Loader(Augmented() if dataset is None else dataset, 4, seed=40, **options)


def same(one: object, other: object) -> bool:
    """Bit for bit, in the same layout."""
    pairs = [*zip(tensors(one), tensors(other), strict=True)]
    return bool(pairs) and all(torch.equal(a, b) and a.stride() == b.stride() and a.dtype == b.dtype for a, b in pairs)


def readers() -> set[int]:
    return {child.pid for child in psutil.Process().children()}


@pytest.mark.parametrize("shuffle", [True, False])
def test_over_tensors_its_batches_are_those_of_rows(shuffle: bool) -> None:
    ours, theirs = Loader(TensorDataset(X, Y), 4, 40, shuffle=shuffle), Rows(X, Y, 4, 40, shuffle=shuffle)
    assert len(ours) == ours.steps_per_epoch == theirs.steps_per_epoch == 3
    assert all(same(ours.batch(step), theirs.batch(step)) for step in (5, 0, 1, 2, 3, 4))


def test_drop_last_leaves_out_the_smaller_batch_of_every_epoch_and_of_no_held_out_rows() -> None:
    whole, dropping = (
        Loader(TensorDataset(X, Y), 4, 40, drop_last=drops, held_out=TensorDataset(X, Y)) for drops in (False, True)
    )
    epochs = [batch for epoch in range(2) for batch in whole.batches(epoch * 3, epochs=epoch + 1) if len(batch[0]) == 4]
    assert len(dropping) == dropping.steps_per_epoch == 2
    assert all(same(dropping.batch(step), batch) for step, batch in enumerate(epochs))
    assert [same(*each) for each in zip(dropping.batches(epochs=2), epochs, strict=True)] == [True] * 4
    assert len(dropping.held_out()) == 3
    assert len(Loader(TensorDataset(X, Y), 5, 40, drop_last=True)) == 2  # nothing is left over


def test_drop_last_of_every_batch_is_refused() -> None:
    with pytest.raises(DataError, match=r"drop_last .*10 rows, and batch_size is 11\. Use batch_size = 10 or less"):
        Loader(TensorDataset(X, Y), 11, 40, drop_last=True)


@pytest.mark.slow
def test_readers_change_nothing_about_an_augmentation_that_uses_three_generators() -> None:
    with loader(num_workers=2) as ahead:
        for step, (x, y) in enumerate(islice(ahead.batches(), 8)):
            assert same((x, y), loader().batch(step))
            assert not torch.equal(x, X[y])  # it is augmented
            assert x.data_ptr() % 64 == 0


def test_each_epoch_augments_a_sample_in_another_way() -> None:
    (one, *_), (other, *_) = (
        [x[y == 3] for x, y in loader().batches(epoch * 3, epochs=epoch + 1) if 3 in y] for epoch in (0, 1)
    )
    assert not torch.equal(one, other)


def test_the_three_generators_do_not_draw_alike() -> None:
    class Drawn(Augmented):
        def __getitem__(self, index: int) -> tuple[Tensor, int]:
            return torch.tensor([torch.rand(1).item(), np.random.rand(), random.random()]), index

    assert torch.cat([x for x, _ in loader(Drawn())]).unique().numel() == 30


@pytest.mark.parametrize("num_workers", [0, 1])
def test_the_random_numbers_of_the_process_go_on_as_before(num_workers: int) -> None:
    def draw() -> tuple[float, float, float]:
        return torch.randn(1).item(), np.random.normal(), random.gauss(0, 1)

    def begin() -> None:
        torch.manual_seed(1)
        np.random.seed(1)
        random.seed(1)
        draw()

    begin()
    undisturbed = draw()
    with loader(num_workers=num_workers) as disturbing:
        begin()
        disturbing.batch(0)
        assert draw() == undisturbed


def test_a_loop_walks_one_epoch_and_the_next_loop_the_next_one() -> None:
    looped = loader()
    walked = [*looped, *looped]
    assert len(walked) == 6
    assert all(same(batch, loader().batch(step)) for step, batch in enumerate(walked))


def test_batches_go_on_at_any_step_to_the_end_of_an_epoch() -> None:
    rest = [*loader().batches(start=4, epochs=3)]
    assert len(rest) == 5
    assert all(same(batch, loader().batch(4 + number)) for number, batch in enumerate(rest))


@pytest.mark.slow
def test_a_step_elsewhere_is_drawn_by_the_same_readers() -> None:
    before = readers()
    with loader(num_workers=2) as ahead:
        assert not readers() - before  # none is started before the first batch
        first = ahead.batch(7)
        started = readers() - before
        assert len(started) == 2
        assert all(same(ahead.batch(step), loader().batch(step)) for step in (0, 1, 7, 6, 40))
        assert same(first, loader().batch(7))
        assert readers() - before == started
    assert not readers() - before


def test_readers_end_with_the_last_use_of_their_loader() -> None:
    before = readers()
    assert loader(num_workers=1).batch(0)
    assert not readers() - before


def test_a_loader_that_was_closed_can_be_read_again() -> None:
    with loader(num_workers=1) as ahead:
        pass
    assert same(ahead.batch(0), loader().batch(0))
    ahead.close()


def test_rows_held_out_keep_their_order_and_are_drawn_when_their_turn_comes() -> None:
    kept = Loader(Augmented(), 4, 40, held_out=TensorDataset(X, Y)).held_out()
    assert kept is not None
    assert torch.cat([y for _, y in kept]).tolist() == list(range(10))
    noisy = loader(held_out=Augmented()).held_out()
    assert noisy is not None
    assert all(same(one, other) for one, other in zip([*noisy], [*noisy], strict=True))  # each loop measures the same
    assert loader().held_out() is None


def test_a_batch_is_drawn_with_one_thread_as_in_a_reader() -> None:
    class Threads(Augmented):
        def __getitem__(self, index: int) -> tuple[int, int]:
            return torch.get_num_threads(), index

    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert loader(Threads()).batch(0)[0].tolist() == [1, 1, 1, 1]
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("dataset", "text"),
    [
        (Endless(), "the dataset is a Endless, whose samples come in one order only.*Line.step"),
        (WithoutLength(), "the dataset is a WithoutLength without a length.*__len__"),
        ([], "the dataset, a list, holds 0 samples"),
    ],
)
def test_a_dataset_that_cannot_be_read_at_any_step_is_refused_at_once(dataset: object, text: str) -> None:
    with pytest.raises(DataError, match=text):
        loader(dataset)


def test_wrong_numbers_are_refused_at_once() -> None:
    with pytest.raises(DataError, match=r"batch_size is 0\. Give each batch at least one row"):
        Loader(Augmented(), 0, 40)
    with pytest.raises(DataError, match=r"num_workers is -1\. Use 0"):
        loader(num_workers=-1)


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize(
    ("dataset", "text"),
    [
        (OneBroken(), r"dataset\[7\] failed: KeyError: 7 \(.*test_loader\.py, line \d+, in __getitem__\)"),
        (Unequal(), r"make no batch: RuntimeError: .*dataset\[7\] is \(float32 \[4\], int\).*give a collate_fn"),
        ([object()] * 10, r"make no batch: TypeError: .*dataset\[\d\] is object\. Return tensors"),
    ],
)
def test_a_sample_that_makes_no_batch_is_named(num_workers: int, dataset: object, text: str) -> None:
    with loader(dataset, num_workers=num_workers) as broken, pytest.raises(DataError, match=text):
        list(broken)
