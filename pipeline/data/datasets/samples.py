"""How the batch of a step is drawn from a dataset: sample by sample, each with random numbers of its own.

step 7 ──order──> rows 17, 4, 29 ──dataset[17], ...──> samples ──collate──> batch ──target──> inputs, targets
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch.utils.data import IterableDataset

from stageline.pipeline.data.batch import Batch
from stageline.pipeline.data.order import Order
from stageline.pipeline.errors import DataError

from .parts import Target, form, split_parts
from .seeding import generators_kept, one_thread, seed_generators
from .user_code import called

Collate = Callable[[list[Any]], Any]

_STREAM = (
    "It cannot be read at any step. Give a dataset with __len__ and __getitem__; or, in a script, pass batches of a "
    "stageline.StreamLoader, or of a torch DataLoader of your own, to Line.step; or, in a plan, write a source whose "
    "batch(step) finds them"
)


@dataclass(frozen=True, slots=True)
class Sampling:
    """Draws batches. The same arguments give the same batches in every process, bit for bit."""

    dataset: Any
    order: Order
    seed: int
    collate: Collate
    target: Target

    def batch(self, step: int) -> Batch:
        """Leaves the process's random numbers as they were. Raises `DataError`, with the index and the user's line."""
        epoch, _ = self.order.place(step)
        indices = self.order.rows(step).tolist()
        with generators_kept(), one_thread():
            samples = [self._sample(epoch, index) for index in indices]
            seed_generators(f"{self.seed}/step {step}/collate")
            return split_parts(self._collated(indices, samples), self.target)

    def _sample(self, epoch: int, index: int) -> Any:
        seed_generators(f"{self.seed}/epoch {epoch}/sample {index}")
        return called(partial(self.dataset.__getitem__, index), f"dataset[{index}] failed")

    def _collated(self, indices: Sequence[int], samples: list[Any]) -> Any:
        try:
            return called(partial(self.collate, samples), f"samples {_listed(indices)} make no batch")
        except DataError as error:
            way_out = "Return tensors of one shape from the dataset, or give a collate_fn"
            raise DataError(f"{error}. {_unlike(indices, samples)}. {way_out}.") from error.__cause__


def length_of(dataset: Any) -> int:
    """How many samples `dataset` has. Raises `DataError` if that is not known, or none."""
    kind = type(dataset).__name__
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__"):
        raise DataError(f"the dataset is a {kind}, whose samples come in one order only. {_STREAM}.")
    if not hasattr(dataset, "__len__"):
        raise DataError(f"the dataset is a {kind} without a length. {_STREAM}.")
    count = called(partial(len, dataset), f"len() of the dataset, a {kind}, failed")
    if count == 0:
        raise DataError(f"the dataset, a {kind}, holds 0 samples. Give it at least one.")
    return int(count)


def _listed(indices: Sequence[int]) -> str:
    return ", ".join(map(str, indices[:4])) + (", ..." if len(indices) > 4 else "")


def _unlike(indices: Sequence[int], samples: Sequence[Any]) -> str:
    """The first sample, and the first that has another form, if one has."""
    forms = [_form(sample) for sample in samples]
    other = next((place for place, each in enumerate(forms) if each != forms[0]), 0)
    second = f", dataset[{indices[other]}] is {forms[other]}" if other else ""
    return f"dataset[{indices[0]}] is {forms[0]}{second}"


def _form(sample: Any) -> str:
    with suppress(Exception):  # a sample's own attributes may raise anything
        return form(sample)
    return type(sample).__name__
