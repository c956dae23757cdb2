"""Which batches a fit is trained on, from anywhere."""

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from stageline import DataError, Loader, StreamLoader
from stageline.workers.script.fit_batches import end_of, held_out_of, one_pass, steps_from, steps_of_epoch

PAIRS = [(torch.tensor([number]), torch.tensor([-number])) for number in range(3)]


def drawn(batches: Any, position: int = 0, epochs: int | None = None, steps: int | None = None) -> list[int]:
    return [int(x[0]) for x, _ in steps_from(batches, position, epochs, steps, 1)]


class Numbers(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter([(number, -number) for number in range(3)])


def test_a_list_is_walked_once_for_each_epoch():
    assert drawn(PAIRS) == [0, 1, 2]
    assert drawn(PAIRS, epochs=2) == [0, 1, 2, 0, 1, 2]
    assert drawn(PAIRS, steps=5) == [0, 1, 2, 0, 1]
    assert drawn(PAIRS, epochs=1, steps=5) == [0, 1, 2]


@pytest.mark.parametrize("position", range(8))
def test_a_line_that_goes_on_has_the_batches_that_come_then(position: int):
    every = [0, 1, 2, 0, 1, 2]
    assert drawn(PAIRS, position, epochs=2) == every[position:]
    assert drawn(PAIRS, position, steps=5) == every[position:5]


def test_a_torch_loader_is_walked_once_for_each_epoch():
    def loader() -> Any:
        generator = torch.Generator().manual_seed(0)
        return DataLoader(TensorDataset(torch.arange(6), torch.arange(6)), shuffle=True, generator=generator)

    every = drawn(loader(), epochs=3)
    assert sorted(every) == sorted([*range(6)] * 3)
    assert every[:6] != every[6:12]
    assert drawn(loader(), 8, epochs=3) == every[8:]


class BatchesBefore:
    """Batches that steps were trained on, one row each; it tells how a batch differs from that of its step."""

    def __init__(self, batches: Any) -> None:
        self._rows = [int(x[0]) for x, _ in batches]

    def differs(self, step: int, x: Any, _: Any) -> str:
        return "" if int(x[0]) == self._rows[step] else "inputs differ"


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_loader_in_another_order_is_refused_within_an_epoch_and_not_between_two(accumulate: int):
    def loader(seed: int) -> Any:
        generator = torch.Generator().manual_seed(seed)
        return DataLoader(TensorDataset(torch.arange(6), torch.arange(6)), shuffle=True, generator=generator)

    def number(step: int, x: Any, y: Any) -> str:
        return trained.differs(step, x[0] if accumulate > 1 else x, y)

    trained = BatchesBefore([*loader(0), *loader(0)][::accumulate])
    per_epoch = 6 // accumulate
    with pytest.raises(DataError, match=rf"DataLoader, .* line.position, which is {per_epoch - 1}.*generator="):
        next(steps_from(loader(1), per_epoch - 1, 2, None, accumulate, number))
    assert len(list(steps_from(loader(1), per_epoch, 2, None, accumulate, number))) == per_epoch
    assert len(list(steps_from(loader(0), per_epoch - 1, 1, None, accumulate, number))) == 1


def test_a_loader_with_another_seed_is_refused_within_an_epoch():
    samples = [(number, -number) for number in range(6)]
    trained = BatchesBefore(Loader(samples, 1, 5).batches(epochs=2))
    assert drawn_after(Loader(samples, 1, 5), 4, trained) == [
        int(x) for x, _ in Loader(samples, 1, 5).batches(4, epochs=2)
    ]
    with pytest.raises(DataError, match=r"Loader, .* inputs differ in the batch of step 3"):
        drawn_after(Loader(samples, 1, 8), 4, trained)
    assert len(drawn_after(Loader(samples, 1, 8), 6, trained)) == 6
    stream = StreamLoader(Numbers(), 1, 5)
    assert drawn_after(stream, 2, BatchesBefore(stream.batches(epochs=1))) == [2, 0, 1, 2]
    with pytest.raises(DataError, match=r"StreamLoader, .* step 1"):
        drawn_after(stream, 2, trained)


def drawn_after(batches: Any, position: int, trained: BatchesBefore) -> list[int]:
    return [int(x[0]) for x, _ in steps_from(batches, position, 2, None, 1, trained.differs)]


@pytest.mark.parametrize("position", [0, 2, 4])
def test_a_loader_begins_at_the_position(position: int):
    samples = [(number, -number) for number in range(3)]
    every = [int(x[0]) for x, _ in Loader(samples, 1, 5).batches(epochs=2)]
    assert drawn(Loader(samples, 1, 5), position, epochs=2) == every[position:]
    assert drawn(StreamLoader(Numbers(), 1, 5), position, epochs=2) == [0, 1, 2, 0, 1, 2][position:]


def test_an_iterator_goes_on_from_where_it_stands():
    given = iter(PAIRS)
    next(given)
    assert drawn(given, 7) == [1, 2]
    with pytest.raises(ValueError, match=r"epochs = 2: .* of type list_iterator, which can be walked once"):
        steps_from(iter(PAIRS), 0, 2, None, 1)


def test_several_batches_make_a_step():
    found = list(steps_from(PAIRS, 0, 2, None, 3))
    assert [([int(x) for x in xs], [int(y) for y in ys]) for xs, ys in found] == [([0, 1, 2], [0, -1, -2])] * 2
    assert [int(xs[0]) for xs, _ in steps_from(PAIRS, 1, 2, None, 2)] == [2, 1]


def test_batches_that_are_left_over_are_no_step():
    with pytest.raises(DataError, match="a step has accumulate = 2 batches, and the last 1 make none"):
        list(steps_from(PAIRS, 0, None, None, 2))
    assert len(list(steps_from(PAIRS, 0, 1, 1, 2))) == 1


def test_what_has_no_batches_is_an_error_and_no_endless_loop():
    with pytest.raises(DataError, match="the batches, of type list, have none in epoch 0"):
        drawn([], steps=3)
    with pytest.raises(DataError, match=r"fit takes an iterable of \(x, y\) batches, and it got an object of type int"):
        drawn(3)
    with pytest.raises(DataError, match="batch 1 is of type Tensor"):
        drawn([PAIRS[0], torch.zeros(2)])


def test_what_is_held_out_of_a_loader_is_the_same_each_time():
    samples = [(number, -number) for number in range(9)]
    loader = Loader(samples, 2, 5, held_out=samples)
    held_out = held_out_of(loader)
    assert held_out is not None
    for batches in (held_out, loader):
        first, second = ([x.tolist() for x, _ in one_pass(batches)] for _ in range(2))
        assert first == second
    assert held_out_of(PAIRS) is None


@pytest.mark.parametrize(
    ("batches", "epochs", "steps", "accumulate", "end"),
    [
        ([0] * 5, None, None, 1, 5),
        ([0] * 5, 3, None, 1, 15),
        ([0] * 6, 3, None, 2, 9),
        ([0] * 5, 3, 4, 1, 4),
        ([0] * 5, 1, 40, 1, 5),
        ([0] * 5, None, 40, 1, 40),
        ((each for each in [0]), None, None, 1, None),
        ((each for each in [0]), None, 7, 1, 7),
        (DataLoader(Numbers()), 3, None, 1, None),
    ],
)
def test_where_a_fit_ends_is_known_of_steps_and_of_batches_that_have_a_length(
    batches: Any, epochs: int | None, steps: int | None, accumulate: int, end: int | None
) -> None:
    assert end_of(batches, epochs, steps, accumulate) == end


def test_the_steps_of_an_epoch_follow_from_the_length_of_the_batches():
    assert steps_of_epoch(PAIRS, 1, "evaluate_every") == 3
    assert steps_of_epoch(DataLoader(TensorDataset(torch.arange(6)), batch_size=2), 3, "evaluate_every") == 1
    assert (
        steps_of_epoch(Loader(TensorDataset(torch.arange(5), torch.arange(5)), batch_size=2, seed=0), 1, "lr_every")
        == 3
    )
    for batches in (iter(PAIRS), DataLoader(Numbers())):
        with pytest.raises(ValueError, match=r'evaluate_every = "epoch": .* no len\(\)'):
            steps_of_epoch(batches, 1, "evaluate_every")
    with pytest.raises(ValueError, match=r'lr_every = "epoch": an epoch has 3 batches, .* accumulate = 2'):
        steps_of_epoch(PAIRS, 2, "lr_every")
