"""Drawing of a step's batch from a dataset: sample by sample, each with random numbers of its own.

step 7 ──order──> rows 17, 4, 29 ──dataset[17], ...──> samples ──collate──> batch ──target──> inputs, targets
key "40/epoch 2/sample 17"  ──SHA-256──>  one part each for torch, numpy and `random`
"""

import random
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from importlib import import_module
from typing import Any

import torch
from torch.utils.data import IterableDataset

from stageline.pipeline.data.batch import Batch
from stageline.pipeline.data.memory import Order
from stageline.pipeline.data.parts import Target, form, split_parts
from stageline.pipeline.data.source import called
from stageline.pipeline.errors import DataError

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
