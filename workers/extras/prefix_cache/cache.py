"""Output of the frozen first stages, by sample: written in the first epoch, read in all later ones.

prefix-cache/cache.json    plan keys that the rows were computed from, and the form of the rows
             leaf-0.rows   the first tensor of the output, a row for each sample; then leaf-1.rows, ...
             marks.rows    for each sample, 0 or 1 and the CRC-32 of its rows: int64

keep      microbatch 3 of step 5    its rows -> those of samples 17, 4, 29
rows      microbatch 1 of step 60   samples 4, 8, 17 -> a tensor of three rows

A sample that is computed twice, after a recovery, is written twice, with the same bits.

Files of rows are mapped into memory, and the system writes them. Space for all rows is taken when a file is opened: a
full disk shows then, and does not end the process in the middle of a write.
"""

import mmap
import os
import shutil
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from zlib_ng.zlib_ng import crc32

from stageline.broker.codec.message import LIMITS
from stageline.broker.codec.structure import flatten, unflatten
from stageline.pipeline.data import Numbering
from stageline.pipeline.errors import DataError
from stageline.pipeline.retry import Note, persist, reason_of
from stageline.pipeline.tree import Tree, tensors
from stageline.workers.disk.atomic_file import make_folder, sync
from stageline.workers.runtime.left_out import LEFT_OUT
from stageline.workers.runtime.losses import ComputeFailed

from .header import CachedLeaf, CacheHeader, difference, read_header, write_header

FOLDER = "prefix-cache"
_THERE = 1 << 32  # added to the checksum of a sample that is there


class RowFile:
    """File of rows, mapped into memory: `rows` is uint8 [count, size]."""

    def __init__(self, path: Path, count: int, size: int) -> None:
        """Open the file, or make it with zeros. The system reserves the space on the disk.

        Args:
            path: Path of the file.
            count: Number of rows.
            size: Bytes of a row.

        Raises:
            OSError: The file cannot be opened, or there is no room on the disk.
        """
        wanted = max(1, count * size)
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_CLOEXEC", 0), 0o666)
        try:
            _take_space(self._file, wanted)
            self._memory = mmap.mmap(self._file, wanted)
        except OSError:
            os.close(self._file)
            raise
        self.size = size
        self.rows = torch.frombuffer(self._memory, dtype=torch.uint8)[: count * size].view(count, size)
        self._bytes = memoryview(self._memory)

    def row(self, number: int) -> memoryview:
        """Return the bytes of row `number`."""
        return self._bytes[number * self.size : (number + 1) * self.size]

    def sync(self) -> None:
        """Return once all earlier writes survive a power failure. Any thread may call it. Raises `OSError`."""
        os.fsync(self._file)

    def close(self) -> None:
        """Close the file. Its memory stays until no tensor uses it."""
        os.close(self._file)


def _take_space(file: int, size: int) -> None:
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(file, 0, size)
    if os.fstat(file).st_size != size:
        os.truncate(file, size)


class PrefixCacheFailed(ComputeFailed):
    """Error that the output of the frozen first stages cannot be kept, or read back.

    Mend: Bring the cache's folder back, resume where the data can be read, or leave `model.prefix_cache` out.

    Example: the prefix cache runs/a/prefix lacks samples of microbatch 3 of step 40: they were in no batch of the first
    epoch. Give a data source whose epochs all have the same samples, or leave model.prefix_cache out
    """

    error_code = "SL212"


class PrefixCache:
    """Rows of `samples` samples in a folder, which no other process writes to."""

    def __init__(
        self,
        folder: Path,
        numbering: Numbering,
        samples: int,
        parts: dict[str, Any],
        *,
        note: Note = lambda fault: None,
        wait: Callable[[float], object] = time.sleep,
    ) -> None:
        """Create a cache without rows, to be filled by `keep` or `open`.

        Args:
            folder: Folder of the files.
            numbering: Gives the samples of each microbatch.
            samples: Number of samples.
            parts: Keys of the plan that the rows follow from, and their values.
            note: Called with the fault while there is no room on the disk.
            wait: Waits for a number of seconds before the next attempt.
        """
        self.folder = folder
        self._note = note
        self._wait = wait
        self._numbering = numbering
        self._samples = samples
        self._parts = parts
        self._header: CacheHeader | None = None
        self._types: list[torch.dtype] = []
        self._files: list[RowFile] = []
        self._marks = torch.zeros(0, dtype=torch.int64)
        self._mark_file: RowFile | None = None
        self._unsaved = False

    def keep(self, step: int, microbatch: int, received: Tree) -> None:
        """Copy the rows of a microbatch into the cache.

        Args:
            step: Step of the microbatch.
            microbatch: Number of the microbatch.
            received: Output of the frozen stages: tensors of shape [rows, ...].

        Raises:
            PrefixCacheFailed: The rows have another form than earlier ones, or there is no room for them on the disk.
        """
        samples = self._numbering.microbatch(step, microbatch)
        structure, parts = flatten(received, LIMITS.depth)[0], tensors(received)
        if not len(samples):
            return
        place = f"microbatch {microbatch} of step {step}"
        self._require_rows(parts, len(samples), place)
        self._require_form(structure, [CachedLeaf.of(tensor) for tensor in parts], place)
        for file, tensor in zip(self._files, parts, strict=True):
            file.rows.index_copy_(0, samples, _bytes_of(tensor, file.size))
        self._marks.index_copy_(0, samples, torch.tensor([self._sum(each) for each in samples.tolist()]))
        self._unsaved = True

    def rows(self, step: int, microbatch: int) -> Tree:
        """Return the kept rows of a microbatch's samples, as the tree that `keep` was given, in memory of its own.

        Without samples, the microbatch is left out.

        Args:
            step: Step of the microbatch.
            microbatch: Number of the microbatch.

        Raises:
            PrefixCacheFailed: A sample is not in the cache.
        """
        samples = self._numbering.microbatch(step, microbatch)
        if not len(samples):
            return LEFT_OUT
        header = self._header
        if header is None or not self._marks.index_select(0, samples).all():
            raise PrefixCacheFailed(
                f"the prefix cache {self.folder} lacks samples of microbatch {microbatch} of step {step}: they were in "
                "no batch of the first epoch. Give a data source whose epochs all have the same samples, or leave "
                "model.prefix_cache out"
            )
        parts = zip(self._files, header.leaves, self._types, strict=True)
        found = (
            file.rows.index_select(0, samples).view(-1).view(dtype).view(len(samples), *leaf.shape)
            for file, leaf, dtype in parts
        )
        return unflatten(header.structure, found)

    def sync(self) -> None:
        """Return once all rows that were kept before survive a power failure.

        Any thread may call it. It may be repeated after it has raised `OSError`.
        """
        if not self._unsaved:
            return
        self._unsaved = False  # first: what is kept meanwhile is for the next time
        try:
            for file in (*self._files, *filter(None, [self._mark_file])):
                file.sync()
        except OSError:
            self._unsaved = True  # this will be tried again
            raise

    def open(self, steps: int) -> str:
        """Continue with the rows on the disk of the first `steps` steps. Reads every byte.

        Returns:
            Why the rows cannot be used; "" if they can.
        """
        try:
            header = read_header(self.folder)
            if wrong := difference(header, self._parts, self._samples):
                return wrong
            self._open_files(header, new=False)
        except FileNotFoundError as error:
            return f"{Path(error.filename).name} is missing"
        except (OSError, ValueError) as error:
            return reason_of(error)
        return self._damage(steps)

    def clear(self) -> None:
        """Forget all rows, and remove the folder. Raises `PrefixCacheFailed` if it cannot be removed."""
        self._close()
        try:
            if self.folder.exists():
                shutil.rmtree(self.folder)
        except OSError as error:
            raise PrefixCacheFailed(f"the prefix cache {self.folder} cannot be removed: {reason_of(error)}") from None

    def _damage(self, steps: int) -> str:
        """Return what is wrong with the rows of the first `steps` steps; "" if they are intact."""
        samples = {each for batch in self._numbering.batches(steps) for each in batch.tolist()}
        absent = sum(not self._marks[each] for each in samples)
        if absent:
            return f"{absent} of {len(samples)} samples are missing"
        wrong = sum(self._sum(each) != int(self._marks[each]) for each in samples)
        return (
            f"the rows of {wrong} of {len(samples)} samples are damaged: their CRC-32 does not match" if wrong else ""
        )

    def _sum(self, sample: int) -> int:
        found = 0
        for file in self._files:
            found = crc32(file.row(sample), found)
        return found + _THERE

    def _require_rows(self, tensors: Iterable[Tensor], rows: int, place: str) -> None:
        for number, tensor in enumerate(tensors):
            if not tensor.dim() or len(tensor) != rows:
                raise PrefixCacheFailed(
                    f"model.prefix_cache: tensor {number} of what leaves the frozen stages in {place} has the shape "
                    f"{list(tensor.shape)}, and the microbatch has {rows} rows: a tensor that does not have a row for "
                    "each sample cannot be kept by sample. Cut elsewhere, or leave model.prefix_cache out"
                )

    def _require_form(self, structure: Any, leaves: list[CachedLeaf], place: str) -> None:
        if self._header is None:
            self._begin(
                CacheHeader(parts=self._parts, samples=self._samples, structure=structure, leaves=tuple(leaves))
            )
        header = self._header
        if header is not None and (header.structure, header.leaves) != (structure, tuple(leaves)):
            raise PrefixCacheFailed(
                f"model.prefix_cache: sample shapes that vary: what leaves the frozen stages is {_listed(leaves)} in "
                f"{place}, and was {_listed(header.leaves)} before. Pad all samples to one length, or leave "
                "model.prefix_cache out"
            )

    def _begin(self, header: CacheHeader) -> None:
        """Take space on the disk for all rows. Wait while the disk is full."""
        size = header.row_bytes * header.samples
        what = f"take {size} bytes for {header.samples} samples in {self.folder}"
        try:
            persist(partial(self._open_files, header, new=True), what, self._note, now=time.monotonic, wait=self._wait)
        except OSError as error:  # no other process could do better
            raise PrefixCacheFailed(
                f"the prefix cache cannot {what}: {reason_of(error)}. Make room on that disk and resume the run"
            ) from None

    def _open_files(self, header: CacheHeader, *, new: bool) -> None:
        self._close()
        types = [leaf.type for leaf in header.leaves]
        sizes = {f"leaf-{number}.rows": leaf.bytes for number, leaf in enumerate(header.leaves)} | {"marks.rows": 8}
        if new:
            make_folder(self.folder)
        else:
            _require_sizes(self.folder, sizes, header.samples)
        for name, size in sizes.items():
            self._files.append(RowFile(self.folder / name, header.samples, size))
        if new:
            sync(self.folder)
            write_header(self.folder, header)
        self._mark_file = self._files.pop()
        self._marks = self._mark_file.rows.view(torch.int64).view(-1)
        self._header, self._types = header, types

    def _close(self) -> None:
        for file in (*self._files, *filter(None, [self._mark_file])):
            file.close()
        self._files, self._mark_file, self._header = [], None, None


def _require_sizes(folder: Path, sizes: dict[str, int], samples: int) -> None:
    """Raise `ValueError` for a file with another length than it was made with, `OSError` for a missing file."""
    for name, size in sizes.items():
        found, wanted = (folder / name).stat().st_size, max(1, samples * size)
        if found != wanted:
            raise ValueError(f"{name} has {found} bytes, made were {wanted}")


def _bytes_of(tensor: Tensor, size: int) -> Tensor:
    """Return the rows of a tensor as they are kept: uint8 [rows, size]."""
    here = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    return here.view(-1).view(torch.uint8).view(len(tensor), size)


def _listed(leaves: Iterable[CachedLeaf]) -> str:
    return ", ".join(map(str, leaves))


def require_numbering(found: Numbering | None) -> Numbering:
    """Return `found`. Raise `DataError` if it is None: neither the data nor the broker gives the samples of a batch."""
    if found is None:
        raise DataError("neither the data nor the broker says which samples a batch has")
    return found
