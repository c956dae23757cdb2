"""A source may tell which samples its rows are; what it tells is checked."""

import pytest
import torch

from stageline import DataError, Loader, Rows
from stageline.pipeline.data import Feed
from stageline.pipeline.data.source import samples_of

X, Y = torch.arange(20.0)[:, None], torch.arange(20)


class Telling(Rows):
    """Rows that tell what a test wants."""

    told: object = None

    def samples(self, step: int) -> torch.Tensor:
        if isinstance(self.told, Exception):
            raise self.told
        return self.told  # type: ignore[return-value]


def test_rows_and_loaders_tell_the_numbers_of_their_rows_in_the_data() -> None:
    for shuffle in (True, False):
        rows = Rows(X, Y, 6, 3, shuffle=shuffle)
        loader = Loader(list(zip(X, Y, strict=True)), 6, 3, shuffle=shuffle)
        for step in range(9):
            assert torch.equal(samples_of(rows, step), rows.batch(step)[1])
            assert torch.equal(samples_of(loader, step), loader.batch(step)[1])


def test_a_source_without_the_method_tells_none() -> None:
    class Untelling:
        """A source of one's own."""

        steps_per_epoch = 1

        def batch(self, step: int) -> tuple[torch.Tensor, torch.Tensor]:
            return X, Y

        def held_out(self) -> None:
            """None."""

    assert Feed(Untelling(), 2, 3, 20).samples(0, 1) is None


@pytest.mark.parametrize(
    ("told", "reason"),
    [
        ([1, 2], r"the data source's samples\(4\) is list; expected numbers from 0 on, int64 \[rows\]"),
        (torch.ones(6), r"is torch.float32 \[6\]; expected"),
        (torch.zeros(2, 1, dtype=torch.int64), r"is torch.int64 \[2, 1\]; expected"),
        (torch.tensor([1, -1]), r"is torch.int64 \[2\]; expected"),
        (ValueError("lost"), r"samples\(4\) failed: ValueError: lost \(.*test_source.py, line \d+, in samples\)"),
    ],
)
def test_what_is_told_otherwise_is_refused(told: object, reason: str) -> None:
    source = Telling(X, Y, 6, 3)
    source.told = told
    with pytest.raises(DataError, match=reason):
        samples_of(source, 4)


def test_a_feed_cuts_the_numbers_as_it_cuts_the_rows() -> None:
    feed = Feed(Rows(X, Y, 7, 0, held_out=(X[:10], Y[10:])), 2, 3, 7, accumulate=2)
    for step in range(3):
        for microbatch in range(4):
            assert torch.equal(feed.samples(step, microbatch), feed.microbatch(step, microbatch).targets)
    held_out = torch.cat([feed.held_out_samples(batch, microbatch) for batch in (0, 1) for microbatch in range(4)])
    assert held_out.tolist() == list(range(10))
    loader = Loader([(0, 0)] * 9, 4, 0, held_out=[(1, 1)] * 5)
    assert [len(Feed(loader, 2, 1, 4).held_out_samples(batch, 0)) for batch in (0, 1, 2)] == [2, 1, 2]
    with pytest.raises(DataError, match="no rows are held out"):
        Feed(Rows(X, Y, 7, 0), 2, 3, 7).held_out_samples(0, 0)


def test_another_number_of_numbers_than_of_rows_is_refused() -> None:
    source = Telling(X, Y, 6, 3)
    source.told = torch.arange(5)
    with pytest.raises(DataError, match="samples gave 2 numbers for the 3 rows of microbatch 1 of step 0"):
        Feed(source, 2, 3, 6).samples(0, 1)
