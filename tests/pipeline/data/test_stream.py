"""An iterable dataset in a script's loop."""

import random
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch.utils.data import IterableDataset

from stageline import DataError, StreamLoader


class AugmentedStream(IterableDataset[tuple[Tensor, int]]):
    """Ten samples, augmented as they are read."""

    def __iter__(self) -> Iterator[tuple[Tensor, int]]:
        for number in range(10):
            yield torch.randn(3) * random.random(), number


def rows(loader: StreamLoader, start: int = 0, epochs: int = 2) -> list[tuple[Tensor, Tensor]]:
    return list(loader.batches(start, epochs=epochs))


def test_batches_that_begin_later_are_those_of_an_uninterrupted_loop() -> None:
    whole = rows(StreamLoader(AugmentedStream(), 4, seed=1))
    assert [y.tolist() for _, y in whole] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]] * 2
    for start in range(7):
        later = rows(StreamLoader(AugmentedStream(), 4, seed=1), start)
        assert len(later) == 6 - start
        for one, other in zip(later, whole[start:], strict=True):
            assert torch.equal(one[0], other[0])
    assert not torch.equal(whole[0][0], whole[3][0])  # another epoch augments in another way


def test_the_scripts_own_random_numbers_go_on_as_before() -> None:
    torch.manual_seed(3)
    expected = torch.randn(4)
    torch.manual_seed(3)
    batches = StreamLoader(AugmentedStream(), 4, seed=1).batches()
    found = [torch.randn(1)]
    for _ in range(3):
        next(batches)
        found.append(torch.randn(1))
    assert torch.equal(torch.cat(found), expected)


@pytest.mark.parametrize(
    ("dataset", "text"),
    [
        (3, "the dataset is a int, which cannot be read again from its first sample"),
        (iter([1]), "which cannot be read again from its first sample"),
        ([], "the dataset, of type list, gave no sample in epoch 0"),
        ([(torch.ones(2), 0), (torch.ones(3), 0)], "the samples of step 0 make no batch"),
    ],
)
def test_what_is_no_stream_is_refused(dataset: object, text: str) -> None:
    with pytest.raises(DataError, match=text):
        rows(StreamLoader(dataset, 2, seed=1))  # type: ignore[arg-type]
