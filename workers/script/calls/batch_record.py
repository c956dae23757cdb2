"""Remembers which batches a run was trained on, so that a script which resumes it with another loader is told.

batches.jsonl    [12, 2746444292, 1223]    step 12, and the CRC-32 of each tensor of its batch, as its messages have it

There are the steps from the last but one complete checkpoint on, which may be trained again, and some before. A killed
script may leave half a line at the end. What the disk does not take is not compared.
"""

from contextlib import suppress
from pathlib import Path

import msgspec
import structlog
from torch import Tensor

from stageline.broker.codec.tensors import pack
from stageline.pipeline.errors import DataError
from stageline.pipeline.tree import Tree, leaves
from stageline.workers.disk.atomic_file import write_file

NAME = "batches.jsonl"
SPARE = 256  # lines that are not needed any more, before the file is written again

log = structlog.get_logger()


class BatchRecord:
    """Of the run in `folder`, which goes on after `start` steps. With `compares`, batches must be those of before."""

    def __init__(self, folder: Path, start: int, *, compares: bool) -> None:
        self._file = folder / NAME
        self._start = start
        self._kept = _read(self._file)
        self._lines = len(self._kept)
        self._before = {step: sums for step, sums in self._kept.items() if step >= start} if compares else {}
        self._complete = start

    def check(self, step: int, inputs: Tree, targets: Tree) -> None:
        """Raises `DataError` if this is not the batch that the run was given before for `step`."""
        before = self._before.get(step)
        if before is None:
            return
        tensors = [(path, leaf) for path, leaf in leaves((inputs, targets)) if isinstance(leaf, Tensor)]
        if len(tensors) != len(before):
            what = f"it has {len(tensors)} tensors, and had {len(before)}"
        else:
            found = [(_name(path), pack(tensor)[0].crc32) for path, tensor in tensors]
            what = " and ".join(name for (name, crc), old in zip(found, before, strict=True) if crc != old)
            what = f"{what} differ" if what else ""
        if what:
            raise DataError(
                f"the batch of step {step} is not the one that this run was given for it before: {what}. Begin the "
                f"loader at line.position, which was {self._start}, with the seed and the order of before; "
                'settings={"data.check": False} goes on all the same'
            )

    def note(self, step: int, sums: tuple[int, ...]) -> None:
        """`step` is trained on the batch whose tensors have these checksums."""
        self._kept[step] = sums
        self._lines += 1
        with suppress(OSError), self._file.open("ab") as file:
            file.write(_line(step, sums))

    def trim(self, complete: int) -> None:
        """The checkpoint of step `complete` is; the one before it may still be gone back to."""
        if complete <= self._complete:
            return
        self._kept = {step: sums for step, sums in self._kept.items() if step >= self._complete}
        self._complete = complete
        if self._lines <= 2 * len(self._kept) + SPARE:
            return
        self._lines = len(self._kept)
        try:
            write_file(self._file, b"".join(_line(*each) for each in self._kept.items()))
        except OSError as error:
            log.warning("the checksums of batches are not kept", reason=str(error))


def _line(step: int, sums: tuple[int, ...]) -> bytes:
    return msgspec.json.encode((step, *sums)) + b"\n"


def _read(file: Path) -> dict[int, tuple[int, ...]]:
    found: dict[int, tuple[int, ...]] = {}
    with suppress(OSError):
        for line in file.read_bytes().splitlines():
            with suppress(msgspec.MsgspecError):
                step, *sums = msgspec.json.decode(line, type=tuple[int, ...])
                found[step] = tuple(sums)
    return found


def _name(path: str) -> str:
    """ "[0]['mask']" of (inputs, targets) is "inputs['mask']"."""
    return f"{'inputs' if path.startswith('[0]') else 'targets'}{path[3:]}"
