"""Record of the batches that a run was trained on, so that a script which resumes it with another loader is told.

batches.jsonl    [12, 2746444292, 1223]    step 12, and the CRC-32 of each tensor of its batch, as its messages have it
                 {"fit":1,"first":0}       the first call of `Line.fit` began at step 0

The file has the steps from the last but one complete checkpoint on, which may be trained again, and some before. A
killed script may leave half a line at the end. Batches that the disk did not take are not compared.

A script that is resumed in the middle of an epoch walks its batches from the beginning of the fit and drops those
before its position. The newest of them must be those that the steps before were trained on: a loader that shuffles by
a generator without a seed would otherwise train some rows twice and others never.
"""

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TypeAlias

import msgspec
import structlog
from torch import Tensor

from stageline.broker.codec.message import pack
from stageline.pipeline.errors import DataError
from stageline.pipeline.tree import Tree, leaves
from stageline.workers.disk.atomic_file import write_file

NAME = "batches.jsonl"
DiffersFrom: TypeAlias = Callable[[int, Tree, Tree], str]  # of a step and its batch: how it differs, "" if it does not
SPARE = 256  # lines that are not needed any more, before the file is written again

log = structlog.get_logger()


class FitBegun(msgspec.Struct, frozen=True):
    """Step at which a call of `Line.fit`, known by its number in the script, began."""

    fit: int
    first: int


class BatchRecord:
    """Record of a run's batches by step, in the file `batches.jsonl` of its folder."""

    def __init__(self, folder: Path, start: int, *, compares: bool) -> None:
        """Read the record.

        Args:
            folder: Folder of the run.
            start: Step at which the run begins or resumes.
            compares: Batches of recorded steps must equal the recorded ones.
        """
        self._file = folder / NAME
        self._start = start
        self._compares = compares
        self._kept, self._fits = _read(self._file)
        self._lines = len(self._kept)
        self._before = {step: sums for step, sums in self._kept.items() if step >= start} if compares else {}
        self._complete = start
        self._ends_line = b"\n"  # of half a line that a killed script has left

    def check(self, step: int, inputs: Tree, targets: Tree) -> None:
        """Raise `DataError` if the batch of `step` differs from the one recorded before.

        Args:
            step: Number of the step, counted from 0.
            inputs: Inputs of the batch.
            targets: Targets of the batch.
        """
        if what := _difference(self._before.get(step), inputs, targets):
            raise DataError(
                f"the batch of step {step} is not the one that this run was given for it before: {what}. Begin the "
                f"loader at line.position, which was {self._start}, with the seed and the order of before; "
                'settings={"data.check": False} goes on all the same'
            )

    def of_fit(self, number: int, position: int) -> DiffersFrom | None:
        """Return a function that compares the batches that fit `number` drops before `position` with recorded ones.

        Returns None if the fit has trained no step yet, or nothing is to be compared.
        """
        begun = self._fits.get(number, position)
        if begun >= position:
            self._fits = {**self._fits, number: position}  # replaced, since another thread reads it
            self._write(msgspec.json.encode(FitBegun(number, position)) + b"\n")

        def differs(step: int, inputs: Tree, targets: Tree) -> str:
            return _difference(self._kept.get(step) if step >= begun else None, inputs, targets)

        return differs if self._compares and begun < position else None

    def note(self, step: int, sums: tuple[int, ...]) -> None:
        """Record the checksums of the tensors of the batch that `step` is trained on."""
        self._kept[step] = sums
        self._write(_line(step, sums))

    def trim(self, complete: int) -> None:
        """Drop steps before the previous complete checkpoint, to which the run may still go back.

        `complete` is the step of the newest complete checkpoint.
        """
        if complete <= self._complete:
            return
        self._kept = {step: sums for step, sums in self._kept.items() if step >= self._complete}
        self._complete = complete
        if self._lines <= 2 * len(self._kept) + SPARE:
            return
        self._lines = len(self._kept)
        try:
            fits = b"".join(msgspec.json.encode(FitBegun(*each)) + b"\n" for each in self._fits.items())
            write_file(self._file, fits + b"".join(_line(*each) for each in self._kept.items()))
        except OSError as error:
            log.warning("the checksums of batches are not kept", reason=str(error))

    def _write(self, line: bytes) -> None:
        self._lines += 1
        with suppress(OSError), self._file.open("ab") as file:
            file.write(self._ends_line + line)
            self._ends_line = b""


def keep_batches(source: Path, step: int, target: Path) -> None:
    """Copy the record in the folder `source` into the folder `target`, without steps from `step` on.

    Args:
        source: Folder of a run.
        step: First step to leave out.
        target: Folder of a checkpoint.
    """
    kept, fits = _read(source / NAME)
    lines = [msgspec.json.encode(FitBegun(*each)) + b"\n" for each in fits.items() if each[1] < step]
    lines += [_line(*each) for each in kept.items() if each[0] < step]
    with suppress(OSError):
        if lines:
            write_file(target / NAME, b"".join(lines))


def _line(step: int, sums: tuple[int, ...]) -> bytes:
    return msgspec.json.encode((step, *sums)) + b"\n"


def _read(file: Path) -> tuple[dict[int, tuple[int, ...]], dict[int, int]]:
    """Return the checksums by step, and the first step of each fit."""
    found: dict[int, tuple[int, ...]] = {}
    fits: dict[int, int] = {}
    with suppress(OSError):
        for line in file.read_bytes().splitlines():
            with suppress(msgspec.MsgspecError, ValueError):
                match msgspec.json.decode(line, type=tuple[int, ...] | FitBegun):
                    case FitBegun(number, first):
                        fits[number] = first
                    case (step, *sums):
                        found[step] = tuple(sums)
    return found, fits


def _difference(before: tuple[int, ...] | None, inputs: Tree, targets: Tree) -> str:
    """Return which tensors of a batch have other checksums than `before`; "" if none has, or `before` is None."""
    if before is None:
        return ""
    tensors = [(path, leaf) for path, leaf in leaves((inputs, targets)) if isinstance(leaf, Tensor)]
    if len(tensors) != len(before):
        return f"it has {len(tensors)} tensors, and had {len(before)}"
    found = [(_name(path), pack(tensor)[0].crc32) for path, tensor in tensors]
    what = " and ".join(name for (name, crc), old in zip(found, before, strict=True) if crc != old)
    return f"{what} differ" if what else ""


def _name(path: str) -> str:
    """Return a readable path: "[0]['mask']" of (inputs, targets) becomes "inputs['mask']"."""
    return f"{'inputs' if path.startswith('[0]') else 'targets'}{path[3:]}"
