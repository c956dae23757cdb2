"""What a trial writes down, as checksums, and what two transcripts that differ mean.

Two processes try the same plan, and each asks its data source twice for the same batch:

    process A    batch(0)  ... one microbatch ...  batch(0)
                    │ must agree                      │ with the first: stages draw from sources of their own
    process B    batch(0)  ... one microbatch ...  batch(0)
"""

from collections.abc import Iterator, Sequence
from itertools import zip_longest

import msgspec

ROWS = 4096  # of a tensor that have a checksum of their own; the others have one in common

_GO_ON = "data.check = false goes on all the same"
_DATA = (
    "The first and the last stage each draw from a source of their own, and so does a replacement: inputs would be "
    "trained with the targets of other rows. "
)
_SOURCE = (
    f"{_DATA}Draw with a generator that is seeded with the `seed` that the source is given, or with the seed and the "
    f"step, and sort what comes from a set or a folder; {_GO_ON}."
)
_DATASET = (
    f"{_DATA}Each sample is drawn with the default generators of torch, numpy and `random` seeded: draw with those, or "
    f"seed a generator of your own from them in __getitem__, and sort what comes from a set or a folder; {_GO_ON}."
)
_COMPUTED = (
    "Something in the model, the loss or the optimizer depends on more than the seed: a replacement of a lost worker "
    "would compute other bits. torch.use_deterministic_algorithms(True) in model.py names operations that do; numbers "
    "that are not torch's need a generator that is seeded, and a set has another order in each process "
    f"(PYTHONHASHSEED); {_GO_ON}."
)


class LeafRecord(msgspec.Struct, frozen=True):
    """One leaf of a tree: what it is ("float32 [6, 4]", or a plain value), and its checksums."""

    name: str
    what: str
    whole: int = 0
    rows: tuple[int, ...] = ()


class Transcript(msgspec.Struct, frozen=True):
    """`first` and `second`: what two calls of batch(0) gave. `computed`: what one microbatch gave, in order. The data
    are a plan's source, or its `dataset`."""

    first: tuple[LeafRecord, ...]
    second: tuple[LeafRecord, ...]
    held_out: tuple[LeafRecord, ...]
    computed: tuple[LeafRecord, ...]
    dataset: bool = False

    @property
    def key(self) -> str:
        """Of the plan, that names the data."""
        return "data.dataset" if self.dataset else "data.source"

    @property
    def advice(self) -> str:
        return _DATASET if self.dataset else _SOURCE


def repeats(one: Transcript) -> str:
    """How the second call of batch(0) differs from the first, and what to do about it; "" if it does not."""
    found = _difference(one.first, one.second)
    again = "batch(0) gave other values when it was called again"
    return f"{one.key}: {again}: {found}. {one.advice}" if found else ""


def agrees(one: Transcript, other: Transcript) -> str:
    """How two processes differ, and what to do about it; "" if they do not."""
    for call, ours, theirs in (("batch(0)", one.first, other.first), ("held_out()", one.held_out, other.held_out)):
        if found := _difference(ours, theirs):
            return f"{one.key}: {call} gave other values in another process: {found}. {one.advice}"
    found = _difference(one.computed, other.computed)
    return f"one microbatch gave other bits in another process, at first in {found}. {_COMPUTED}" if found else ""


class FirstBatches(msgspec.Struct, frozen=True):
    """What a run's data gave when it began: batch(0), and a batch of the rows held out."""

    first: tuple[LeafRecord, ...]
    held_out: tuple[LeafRecord, ...]


def goes_on(begun: FirstBatches, now: Transcript) -> str:
    """How the data of a run that is resumed differ from those that it began with; "" if they do not."""
    for call, then, here in (("batch(0)", begun.first, now.first), ("held_out()", begun.held_out, now.held_out)):
        if found := _difference(then, here):
            return (
                f"{now.key}: {call} gives other values than when the run began: {found}. Its weights were trained with "
                f"those. Put the data back as they were, or begin a new run; {_GO_ON}."
            )
    return ""


def _difference(ours: Sequence[LeafRecord], theirs: Sequence[LeafRecord]) -> str:
    return next(_differences(ours, theirs), "")


def _differences(ours: Sequence[LeafRecord], theirs: Sequence[LeafRecord]) -> Iterator[str]:
    for here, there in zip_longest(ours, theirs):
        if here is None or there is None:
            yield f"{(here or there).name} is there in only one of them"
        elif here.name != there.name:
            yield f"{here.name} is {there.name} there"
        elif here.what != there.what:
            yield f"{here.name} ({here.what}, then {there.what})"
        elif here != there:
            yield f"{_row(here, there)}{here.name}"


def _row(here: LeafRecord, there: LeafRecord) -> str:
    if not here.rows:
        return ""
    numbers = (number for number, pair in enumerate(zip(here.rows, there.rows, strict=True)) if pair[0] != pair[1])
    return f"row {next(numbers, f'{ROWS} or a later one')} of "
