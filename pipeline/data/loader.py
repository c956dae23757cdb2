"""Loaders of torch's datasets: a map-style one is a data source, too; an iterable one serves a script's own loop.

A step's batch of a map-style dataset is drawn sample by sample, each with random numbers of its own:

    step 7 ──order──> rows 17, 4, 29 ──dataset[17], ...──> samples ──collate──> batch ──target──> inputs, targets
    key "40/epoch 2/sample 17"  ──SHA-256──>  one part each for torch, numpy and `random`
"""

import random
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from importlib import import_module
from itertools import count
from typing import Any, Protocol

import torch
from torch.utils.data import Dataset, IterableDataset, default_collate

from stageline.pipeline.data.batch import Batch, Order
from stageline.pipeline.data.parts import Target, form, split_parts
from stageline.pipeline.data.source import called
from stageline.pipeline.errors import DataError

from .readers import Readers

Collate = Callable[[list[Any]], Any]

_STREAM = (
    "It cannot be read at any step. Give a dataset with __len__ and __getitem__; or, in a script, pass batches of a "
    "stageline.StreamLoader, or of a torch DataLoader of your own, to Line.step; or, in a plan, write a source whose "
    "batch(step) finds them"
)


def seed_generators(key: str) -> None:
    """Seed the default generators of torch (on the CPU), of numpy if it is imported, and of `random`, from `key`."""
    digest = sha256(key.encode()).digest()
    torch.default_generator.manual_seed(int.from_bytes(digest[:8], "little"))
    random.seed(int.from_bytes(digest[8:16], "little"))
    if (numpy_random := _numpy_random()) is not None:
        numpy_random.seed(int.from_bytes(digest[16:20], "little"))


@contextmanager
def generators_kept() -> Iterator[None]:
    """Return a context after which the default generators go on as if nothing had been drawn or seeded within."""
    numpy_random = _numpy_random()
    before = torch.default_generator.get_state(), random.getstate()
    numpys = None if numpy_random is None else numpy_random.get_state()
    try:
        yield
    finally:
        torch.default_generator.set_state(before[0])
        random.setstate(before[1])
        if numpy_random is not None:
            numpy_random.set_state(numpys)


@contextmanager
def one_thread() -> Iterator[None]:
    """Return a context in which torch computes with one thread, as in a reader process.

    With another number of threads, sums are added in another order.
    """
    threads = torch.get_num_threads()
    if threads == 1:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _numpy_random() -> Any:
    """Return `numpy.random`, None if numpy is not imported.

    numpy imports it when it is first used, which may be in the middle of a sample.
    """
    return import_module("numpy.random") if "numpy" in sys.modules else None


@dataclass(frozen=True, slots=True)
class Sampling:
    """Drawing of batches. The same arguments give the same batches in every process, bit for bit.

    Attributes:
        dataset: Map-style dataset.
        order: Order of the samples.
        seed: Seed of the samples' random numbers.
        collate: Makes a batch of a list of samples.
        target: Part of a batch that is the target.
    """

    dataset: Any
    order: Order
    seed: int
    collate: Collate
    target: Target

    def batch(self, step: int) -> Batch:
        """Draw the batch of `step`, and leave the process's random numbers as they were.

        Raises:
            DataError: A sample or the batch cannot be made. The text has the sample's index and the user's line.
        """
        epoch, _ = self.order.place(step)
        indices = self.order.rows(step).tolist()
        with generators_kept(), one_thread():
            samples = [self._sample(epoch, index) for index in indices]
            seed_generators(f"{self.seed}/step {step}/collate")
            return split_parts(self._collated(indices, samples), self.target)

    def _sample(self, epoch: int, index: int) -> Any:
        seed_generators(f"{self.seed}/epoch {epoch}/sample {index}")
        return called(partial(self.dataset.__getitem__, index), f"dataset[{index}]")

    def _collated(self, indices: Sequence[int], samples: list[Any]) -> Any:
        try:
            return called(partial(self.collate, samples), f"samples {_listed(indices)}", "make no batch")
        except DataError as error:
            way_out = "Return tensors of one shape from the dataset, or give a collate_fn"
            raise DataError(f"{error.args[0]}. {_unlike(indices, samples)}. {way_out}.") from error.__cause__


def length_of(dataset: Any) -> int:
    """Return the number of samples in `dataset`. Raises `DataError` if it is not known, or 0."""
    kind = type(dataset).__name__
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__"):
        raise DataError(f"the dataset is a {kind}, whose samples come in one order only. {_STREAM}.")
    if not hasattr(dataset, "__len__"):
        raise DataError(f"the dataset is a {kind} without a length. {_STREAM}.")
    count = called(partial(len, dataset), f"len() of the dataset, a {kind},")
    if count == 0:
        raise DataError(f"the dataset, a {kind}, holds 0 samples. Give it at least one.")
    return int(count)


def _listed(indices: Sequence[int]) -> str:
    return ", ".join(map(str, indices[:4])) + (", ..." if len(indices) > 4 else "")


def _unlike(indices: Sequence[int], samples: Sequence[Any]) -> str:
    """Return the first sample, and the first that has another form, if one has."""
    forms = [_form(sample) for sample in samples]
    other = next((place for place, each in enumerate(forms) if each != forms[0]), 0)
    second = f", dataset[{indices[other]}] is {forms[other]}" if other else ""
    return f"dataset[{indices[0]}] is {forms[0]}{second}"


def _form(sample: Any) -> str:
    with suppress(Exception):  # a sample's own attributes may raise anything
        return form(sample)
    return type(sample).__name__


_END = object()  # of the samples


class MapStyle(Protocol):
    """A map-style dataset that is not derived from torch's: a list, or a dataset of another library."""

    def __len__(self) -> int:
        """Return the number of samples."""
        ...

    def __getitem__(self, index: int, /) -> Any:
        """Return the sample with this index."""
        ...


class Loader(AbstractContextManager["Loader"]):
    """The batches of a map-style dataset: one with `__len__` and `__getitem__`. A loader is a `Source`, too.

        for epoch in range(10):
            for x, y in loader:              # one epoch; the next loop is the next one
                ...
        for x, y in loader.batches(start=250, epochs=10):
            ...                              # from step 250 on, to the end of the tenth epoch

    The order of an epoch follows from the seed and the epoch, as that of `Rows` does. The last batch of an epoch may be
    smaller, unless `drop_last` leaves it out. Every sample is drawn with the default generators of torch, numpy and
    `random` seeded by (seed, epoch, index), and `collate_fn` runs with them seeded by (seed, step). So a batch depends
    on nothing else, and augmentation is the same in every process and after every restart. The generators are then as
    before.

    With reader processes, batches are drawn ahead; they are the same for every number of readers.
    """

    def __init__(
        self,
        dataset: Dataset[Any] | MapStyle,
        batch_size: int,
        seed: int,
        *,
        collate_fn: Collate | None = None,
        num_workers: int = 0,
        target: Target = None,
        shuffle: bool = True,
        drop_last: bool = False,
        held_out: Dataset[Any] | MapStyle | None = None,
    ) -> None:
        """Prepare to draw batches. Readers are forked when the first batch is asked for.

        Args:
            dataset: Map-style dataset.
            batch_size: Samples of a batch.
            seed: Seed of the order and of the samples' random numbers.
            collate_fn: Makes a batch of a list of samples. None for torch's `default_collate`.
            num_workers: Number of reader processes. 0 to draw in this process.
            target: Part of a batch that is the target, if the batch is no pair: the name or place of a part, a list of
                them, or a function that takes the batch and returns (inputs, targets).
            shuffle: False to keep the order of the dataset.
            drop_last: True to leave out the last batch of an epoch if it is smaller; those of `held_out` stay.
            held_out: Dataset to evaluate on, in its own order.

        Raises:
            DataError: The dataset has no length or no samples, or an argument is wrong.
        """
        if num_workers < 0:
            raise DataError(f"num_workers is {num_workers}. Use 0 to draw in this process, or the number of readers.")
        self._order = Order(length_of(dataset), batch_size, seed, shuffle=shuffle, drop_last=drop_last)
        sampling = Sampling(dataset, self._order, seed, collate_fn or default_collate, target)
        self._readers = Readers(sampling.batch, num_workers) if num_workers else None
        self._draw = sampling.batch if self._readers is None else self._readers.batch
        self._epochs: Iterator[int] = count()  # that the next loops walk
        self._held_out: Loader | None = None
        if held_out is not None:
            same = {"collate_fn": collate_fn, "num_workers": num_workers, "target": target}
            self._held_out = _HeldOut(held_out, batch_size, seed, shuffle=False, **same)  # type: ignore[arg-type]

    @property
    def order(self) -> Order:
        """The order of samples, by step."""
        return self._order

    @property
    def steps_per_epoch(self) -> int:
        """Number of batches in an epoch."""
        return self._order.steps_per_epoch

    def __len__(self) -> int:
        """Return the number of batches in an epoch."""
        return self.steps_per_epoch

    def batch(self, step: int) -> Batch:
        """Return the inputs and targets of `step`, which counts from 0 over all epochs.

        Readers go on with the steps after it.

        Raises:
            DataError: A sample or the batch cannot be made. The text has the sample's index and the user's line.
        """
        return self._draw(step)

    def samples(self, step: int) -> torch.Tensor:
        """Return the indices in the dataset of the samples of `batch(step)`, in their order: int64 [rows]."""
        return self._order.rows(step)

    def held_out(self) -> "Loader | None":
        """Return the rows held out, as a loader that walks epoch 0 in every loop; None if there are none."""
        return self._held_out

    def __iter__(self) -> Iterator[Batch]:
        """Iterate over one epoch: the first loop walks epoch 0, the next loop epoch 1."""
        start = next(self._epochs) * self.steps_per_epoch
        return map(self.batch, range(start, start + self.steps_per_epoch))

    def batches(self, start: int = 0, *, epochs: int | None = None) -> Iterator[Batch]:
        """Return the batches from step `start` on, to the end of epoch number `epochs`; without an end for None."""
        steps = count(start) if epochs is None else range(start, epochs * self.steps_per_epoch)
        return map(self.batch, steps)

    def close(self) -> None:
        """End the reader processes. A batch that is asked for afterwards starts others."""
        for readers in (self._readers, self._held_out and self._held_out._readers):
            if readers is not None:
                readers.close()

    def __exit__(self, *_: object) -> None:
        """End the reader processes."""
        self.close()


class _HeldOut(Loader):
    """A loader that walks epoch 0 in every loop."""

    def __iter__(self) -> Iterator[Batch]:
        return map(self.batch, range(self.steps_per_epoch))


class StreamLoader:
    """The batches of an iterable dataset, drawn in this process.

        for x, y in loader.batches(start=line.position, epochs=3):
            ...

    To begin at `start`, all samples before it are drawn and passed over. This takes the time of reading them, and needs
    a dataset that gives the same samples in every pass over the same epoch. Every sample is drawn with the default
    generators of torch, numpy and `random` seeded by (seed, epoch, place), and `collate_fn` runs with them seeded by
    (seed, step); they are then as before. The last batch of an epoch may be smaller.
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
        """Prepare to draw batches.

        Args:
            dataset: Dataset whose `__iter__` begins again with each call.
            batch_size: Samples of a batch.
            seed: Seed of the samples' random numbers.
            collate_fn: Makes a batch of a list of samples, as in `Loader`.
            target: Part of a batch that is the target, as in `Loader`.

        Raises:
            DataError: The dataset is not iterable or cannot be read again, or `batch_size` is below 1.
        """
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
        """Yield the batches from step `start` on, to the end of epoch number `epochs`; without an end for None.

        Steps are counted over all epochs.

        Raises:
            DataError: A sample cannot be drawn, with its place and the user's line; or an epoch has no sample.
        """
        step = 0
        for epoch in count() if epochs is None else range(epochs):
            for samples in self._epoch(epoch):
                if step >= start:
                    yield self._batch(step, samples)
                step += 1

    def _epoch(self, epoch: int) -> Iterator[list[Any]]:
        """Yield the samples of each batch of `epoch`."""
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
            raise DataError(f"the dataset, of type {type(self._dataset).__name__}, gave no sample in epoch {epoch}")

    def _begin(self, epoch: int) -> Iterator[Any]:
        with generators_kept(), one_thread():
            seed_generators(f"{self._seed}/epoch {epoch}")
            found: Iterator[Any] = called(partial(iter, self._dataset), "iter() of the dataset")
            return found

    def _sample(self, iterator: Iterator[Any], epoch: int, place: int) -> Any:
        with generators_kept(), one_thread():
            seed_generators(f"{self._seed}/epoch {epoch}/sample {place}")
            return called(partial(next, iterator, _END), f"sample {place} of epoch {epoch}")

    def _batch(self, step: int, samples: list[Any]) -> Batch:
        with generators_kept(), one_thread():
            seed_generators(f"{self._seed}/step {step}/collate")
            made = called(partial(self._collate, samples), f"the samples of step {step}", "make no batch")
            return split_parts(made, self._target)
