"""An iterable dataset as a loader for a script's own loop: its samples come in one order only, from the first on."""

from collections.abc import Iterable, Iterator
from functools import partial
from itertools import count
from typing import Any

from torch.utils.data import IterableDataset, default_collate

from stageline.pipeline.data.batch import Batch
from stageline.pipeline.errors import DataError

from .parts import Target, split_parts
from .samples import Collate
from .seeding import generators_kept, one_thread, seed_generators
from .user_code import called

_END = object()  # of the samples


class StreamLoader:
    """The batches of an iterable dataset, drawn in this process.

    for x, y in loader.batches(start=line.position, epochs=3):
            ...

    To begin at `start`, all samples before it are drawn and passed over: that takes the time of reading them, and needs
    a dataset that gives the same samples in every pass over the same epoch. Every sample is drawn with the default
    generators of torch, numpy and `random` seeded by (seed, epoch, place), and `collate_fn` by (seed, step); they are
    then as before. The last batch of an epoch may be smaller. `collate_fn` and `target`: as those of `Loader`.

    Raises `DataError` for what is not iterable, and for a `batch_size` below 1.
    """

    def __init__(
        self,
        dataset: "IterableDataset[Any] | Iterable[Any]",
        batch_size: int,
        seed: int,
        *,
        collate_fn: Collate | None = None,
        target: Target = None,
    ) -> None:
        if not hasattr(dataset, "__iter__") or hasattr(dataset, "__next__"):
            kind = type(dataset).__name__
            raise DataError(
                f"the dataset is a {kind}, which cannot be read again from its first sample. Give one with __iter__ "
                "that begins again, such as a torch IterableDataset"
            )
        if batch_size < 1:
            raise DataError(f"batch_size is {batch_size}. Give each batch at least one row.")
        self._dataset, self._batch_size, self._seed = dataset, batch_size, seed
        self._collate, self._target = collate_fn or default_collate, target

    def batches(self, start: int = 0, *, epochs: int | None = None) -> Iterator[Batch]:
        """The batches from step `start` on, counted over all epochs, to the end of epoch number `epochs`; without it
        they do not end. Raises `DataError` with the sample's place and the user's line, or if an epoch has none."""
        step = 0
        for epoch in count() if epochs is None else range(epochs):
            for samples in self._epoch(epoch):
                if step >= start:
                    yield self._batch(step, samples)
                step += 1

    def _epoch(self, epoch: int) -> Iterator[list[Any]]:
        """The samples of each of its batches."""
        place, samples = 0, list[Any]()
        iterator = self._begin(epoch)
        while (sample := self._sample(iterator, epoch, place)) is not _END:
            place += 1
            samples.append(sample)
            if len(samples) == self._batch_size:
                yield samples
                samples = []
        if samples:
            yield samples
        if not place:
            raise DataError(f"the dataset, a {type(self._dataset).__name__}, gave no sample in epoch {epoch}")

    def _begin(self, epoch: int) -> Iterator[Any]:
        with generators_kept(), one_thread():
            seed_generators(f"{self._seed}/epoch {epoch}")
            found: Iterator[Any] = called(partial(iter, self._dataset), "iter() of the dataset failed")
            return found

    def _sample(self, iterator: Iterator[Any], epoch: int, place: int) -> Any:
        with generators_kept(), one_thread():
            seed_generators(f"{self._seed}/epoch {epoch}/sample {place}")
            return called(partial(next, iterator, _END), f"sample {place} of epoch {epoch} failed")

    def _batch(self, step: int, samples: list[Any]) -> Batch:
        with generators_kept(), one_thread():
            seed_generators(f"{self._seed}/step {step}/collate")
            made = called(partial(self._collate, samples), f"the samples of step {step} make no batch")
            return split_parts(made, self._target)
