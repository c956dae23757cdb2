"""Snapshots as they travel between workers: read in chunks from the disk of one, and written to that of the other.

    checkpoints/stage-1/step-0000000040/     at its owner: read through a memory map, a chunk at a time
    manifest.json                        ->  the first chunk, by which the others are known
    weights.safetensors, ...             ->  all further chunks, one file after the other
    checkpoints/stage-1/.step-0000000040-5fa0c1d2/   at its holder: a draft; verified against the manifest, then renamed

A copy is the same folder, byte for byte, so whatever reads a snapshot reads a copy.
"""

import shutil
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Protocol

import structlog
import torch
from torch import Tensor

from stageline.broker.control.checkpoints import CopyState
from stageline.pipeline.program import CHUNKS
from stageline.pipeline.retry import Note
from stageline.pipeline.tree import Tree
from stageline.workers.disk.atomic_file import draft_of, make_folder
from stageline.workers.disk.background_writer import LONGEST_WRITE, BackgroundWriter

from .directory import SnapshotDirectory, SnapshotFailed
from .snapshot import KNOWN, MANIFEST, Manifest, SnapshotDamaged, parse_manifest, read_manifest

LEAST = 2**20  # bytes of a chunk, unless there would be too many
WAITING = 2**26  # bytes of chunks that may wait to be written

log = structlog.get_logger()


class SnapshotLost(SnapshotDamaged):
    """Error that a snapshot is neither on the disk of its worker nor on that of another one.

    Mend: Resume the run as a whole: all stages begin at an older checkpoint of which every snapshot or a copy is left.
    If there is none, begin another run.

    Example: the snapshot runs/a/checkpoints/stage-1/40 cannot be used: it is not on this disk, and no other worker
    holds a copy of it
    """

    error_code = "SL416"

    def __init__(self, folder: Path) -> None:
        """Describe the snapshot that would be in `folder`."""
        super().__init__(folder, ["it is not on this disk, and no other worker holds a copy of it"])


class SnapshotToSend(Protocol):
    """A snapshot to send, in `count` parts."""

    count: int

    def part(self, place: int) -> Tree:
        """Return part `place`, counted from 0. The first says how many others there are."""


class SnapshotToReceive(Protocol):
    """A snapshot that is being received, in `count` parts.

    Attributes:
        count: Number of its parts, the first among them.
    """

    count: int

    @property
    def outcome(self) -> CopyState | None:
        """`DONE` or `FAILED` once that is known; else None. Raises `SnapshotFailed` if the disk cannot be used."""

    @property
    def has_room(self) -> bool:
        """True if another part can be taken now."""

    def add(self, part: Tree) -> None:
        """Take the next part. Raises `SnapshotFailed` if the disk cannot be written to."""

    def discard(self) -> None:
        """Give the snapshot up, unless it is there."""


class CopyStore(Protocol):
    """Snapshots on a worker's disk, its own and those that it holds for others."""

    def has(self, stage: int, step: int) -> bool:
        """Return True if the snapshot is here."""

    def parts(self, stage: int, step: int) -> SnapshotToSend | None:
        """Return a snapshot to send; None if it is not here, or cannot be read."""

    def draft(self, stage: int, step: int, first: Tree) -> SnapshotToReceive | None:
        """Begin to receive a snapshot, whose first part is `first`. Returns None if that cannot be one."""

    def forget(self, stage: int, complete: int, best: int | None) -> None:
        """Delete copies of the stage from before the step `complete`, but for that of `best`. Returns at once."""


class SnapshotParts:
    """Files of a snapshot, whose parts are views of them. They stay readable if they are deleted meanwhile."""

    def __init__(self, folder: Path) -> None:
        """Open the snapshot in `folder`. Raises `SnapshotDamaged` or `OSError`."""
        manifest = read_manifest(folder)
        self._manifest = _bytes_of(folder / MANIFEST)
        self._files = [_mapped(folder / name, size) for name, size in _sizes(manifest).items()]
        self._size = chunk_bytes(manifest)
        self.count = count_of(manifest)

    def part(self, place: int) -> Tree:
        """Return part `place`: the manifest, or the pieces of files that make up a chunk."""
        if place == 0:
            return (self._manifest,)
        first, last = (place - 1) * self._size, place * self._size
        pieces, begin = list[Tensor](), 0
        for file in self._files:
            end = begin + len(file)
            if begin < last and first < end:
                pieces.append(file[max(0, first - begin) : last - begin])
            begin = end
        return tuple(pieces)


class CopyDraft:
    """Draft of a snapshot that another worker sends. A thread writes and verifies it."""

    def __init__(
        self, snapshots: SnapshotDirectory, stage: int, step: int, data: bytes, writer: BackgroundWriter
    ) -> None:
        """Begin a draft, unless the same snapshot is here.

        Args:
            snapshots: Where the snapshot is to be.
            stage: Stage of the snapshot.
            step: Step of the snapshot.
            data: Its manifest.
            writer: Thread that writes it.

        Raises:
            SnapshotDamaged: That is no manifest of such a snapshot.
        """
        self._outcome: CopyState | None = None
        target = snapshots.path(stage, step)
        self._manifest = parse_manifest(data, target)
        if not self._manifest.files.keys() <= KNOWN:
            raise SnapshotDamaged(target, [f"it lists the files {', '.join(self._manifest.files)}"])
        if (least := min(_sizes(self._manifest).values(), default=0)) < 0:
            raise SnapshotDamaged(target, [f"it lists a file of {least} bytes"])
        self.count = count_of(self._manifest)
        self._snapshots, self._stage, self._step = snapshots, stage, step
        self._data = data
        self._draft = draft_of(target)
        self._writer = writer
        self._taken = 1
        self._checked = False
        self._discarded = False
        self._submit(self._check, f"look for the snapshot {target}")

    @property
    def outcome(self) -> CopyState | None:
        """`DONE` or `FAILED` once that is known; else None. Raises `SnapshotFailed` if the disk cannot be used."""
        if self._outcome is None:
            self._writer.demand(True, LONGEST_WRITE, SnapshotFailed)
        return self._outcome

    @property
    def has_room(self) -> bool:
        """True if another part can be taken now."""
        return self._checked and self._outcome is None and self._writer.has_room(self)

    def add(self, part: Tree) -> None:
        """Have the next part written. Raises `SnapshotFailed` if the disk could not be written to."""
        self._writer.demand(True, LONGEST_WRITE, SnapshotFailed)
        pieces = _pieces(part)
        offset = (self._taken - 1) * chunk_bytes(self._manifest)
        self._taken += 1
        size = sum(map(len, pieces))
        self._submit(partial(self._write, offset, pieces), f"write a copy to {self._draft}", size)
        if self._taken == self.count:
            self._submit(self._finish, f"verify the copy {self._draft}")

    def discard(self) -> None:
        """Have the draft removed, unless it has become a snapshot."""
        self._discarded = True
        self._writer.submit(partial(shutil.rmtree, self._draft, ignore_errors=True), what=f"remove {self._draft}")

    def _submit(self, job: Callable[[], None], what: str, size: int = 0) -> None:
        self._writer.submit(partial(self._attempt, job), self, size, what=what)

    def _attempt(self, job: Callable[[], None]) -> None:
        """Do a part of the thread's work, unless the draft is given up. Raises `SnapshotFailed`."""
        if self._discarded or self._outcome is not None:
            return
        try:
            job()
        except (SnapshotDamaged, FileNotFoundError) as error:  # a new owner of the stage clears drafts in its folder
            log.warning("refused", reason=f"a copy of a snapshot that came is not usable: {error}")
            self._outcome = CopyState.FAILED
        except OSError as error:
            raise SnapshotFailed(
                f"the copy of the snapshot of stage {self._stage}, step {self._step} could not be written to "
                f"{self._draft.parent}: {error}. The snapshot itself is untouched; repair this and resume the run"
            ) from error

    def _check(self) -> None:
        """Look for the snapshot here: a holder that has come back may have it."""
        there = self._snapshots.path(self._stage, self._step)
        whole = there.exists() and not self._snapshots.verify(self._stage, self._step)
        if whole and read_manifest(there).same_state(self._manifest):
            self._outcome = CopyState.DONE
            return
        make_folder(there.parent)
        self._draft.mkdir(exist_ok=True)
        (self._draft / MANIFEST).write_bytes(self._data)
        for name in self._manifest.files:
            (self._draft / name).touch()
        self._checked = True
        if self.count == 1:
            self._finish()

    def _write(self, offset: int, pieces: Sequence[Tensor]) -> None:
        """Write pieces of consecutive files, the first of which begins at `offset` of all files together."""
        for name, at, content in _places(self._manifest, offset, pieces):
            with (self._draft / name).open("r+b") as file:
                file.seek(at)
                file.write(content)

    def _finish(self) -> None:
        self._snapshots.receive(self._draft, self._stage, self._step)
        self._outcome = CopyState.DONE


class DiskCopies:
    """Snapshots of a run on this machine, for transfers between workers. Its thread starts with the first of them."""

    def __init__(
        self,
        snapshots: SnapshotDirectory,
        missing: Collection[tuple[int, int]] = (),
        note: Note = lambda fault: None,
    ) -> None:
        """Read and write the snapshots of a run.

        Args:
            snapshots: The snapshots.
            missing: (stage, step) of those that do not count before they have been received: some may be damaged.
            note: Takes the faults of the disk, and None when they have passed.
        """
        self._note = note
        self._snapshots = snapshots
        self._missing = {*missing}
        self._drafts: dict[tuple[int, int], CopyDraft] = {}  # the newest of those that are missing
        self._thread: BackgroundWriter | None = None
        self._newest: dict[int, int] = {}  # announced checkpoint, by stage
        self._cleared: set[int] = set()  # stages without drafts of former processes

    def __enter__(self) -> "DiskCopies":
        """Return this store."""
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        """End the thread."""
        if self._thread is not None:
            self._thread.close(0.0)

    def has(self, stage: int, step: int) -> bool:
        """Return True if there is a snapshot that was not missing, or that was received."""
        draft = self._drafts.get((stage, step))
        received = draft is not None and draft.outcome is CopyState.DONE
        return received or ((stage, step) not in self._missing and self._snapshots.path(stage, step).exists())

    def parts(self, stage: int, step: int) -> SnapshotParts | None:
        """Return a snapshot to send; None if it is not here, or cannot be read."""
        try:
            return SnapshotParts(self._snapshots.path(stage, step)) if self.has(stage, step) else None
        except (SnapshotDamaged, OSError) as error:
            log.warning("refused", reason=f"a snapshot that another worker is to get cannot be read: {error}")
            return None

    def draft(self, stage: int, step: int, first: Tree) -> CopyDraft | None:
        """Begin to receive a snapshot. Returns None if `first` is no manifest."""
        try:
            data = b"".join(bytes(piece.numpy()) for piece in _pieces(first))
            if stage not in self._cleared:
                self._cleared.add(stage)
                self._writer.submit(
                    partial(self._snapshots.delete_drafts, stage), what=f"delete drafts of stage {stage}"
                )
            draft = CopyDraft(self._snapshots, stage, step, data, self._writer)
        except SnapshotDamaged as error:
            log.warning("refused", reason=f"a copy of a snapshot that came is not usable: {error}")
            return None
        if (stage, step) in self._missing:
            self._drafts[stage, step] = draft
        return draft

    def forget(self, stage: int, complete: int, best: int | None) -> None:
        """Queue the deletion of copies from before the complete checkpoint that precedes `complete`."""
        before = self._newest.get(stage, 0)
        if complete > before:
            self._newest[stage] = complete
            delete = partial(self._snapshots.delete_before, stage, before, best)
            self._writer.submit(delete, what=f"delete copies of stage {stage} before step {before}")

    @property
    def _writer(self) -> BackgroundWriter:
        if self._thread is None:
            self._thread = BackgroundWriter("copies", WAITING, note=self._note)
        return self._thread


def chunk_bytes(manifest: Manifest) -> int:
    """Return the bytes of each chunk but the last."""
    return max(LEAST, -(-sum(_sizes(manifest).values()) // (CHUNKS - 1)))


def count_of(manifest: Manifest) -> int:
    """Return the number of parts that a snapshot is sent in."""
    return 1 + -(-sum(_sizes(manifest).values()) // chunk_bytes(manifest))


def _sizes(manifest: Manifest) -> Mapping[str, int]:
    return {name: manifest.files[name].bytes for name in sorted(manifest.files)}


def _places(manifest: Manifest, offset: int, pieces: Sequence[Tensor]) -> list[tuple[str, int, memoryview]]:
    """Return the file of each piece, the place in it, and the bytes."""
    found, begin = list[tuple[str, int, memoryview]](), 0
    left = list(pieces)
    for name, size in _sizes(manifest).items():
        if left and begin <= offset < begin + size:
            piece = left.pop(0)
            if offset + len(piece) > begin + size:
                raise SnapshotDamaged(Path(name), ["a copy of it came with more bytes than it has"])
            found.append((name, offset - begin, piece.numpy().data))
            offset += len(piece)
        begin += size
    return found


def _pieces(part: Tree) -> list[Tensor]:
    given = part if isinstance(part, tuple | list) else ()
    return [piece for piece in given if isinstance(piece, Tensor) and piece.dtype == torch.uint8 and piece.dim() == 1]


def _bytes_of(file: Path) -> Tensor:
    return torch.frombuffer(bytearray(file.read_bytes()), dtype=torch.uint8)


def _mapped(file: Path, size: int) -> Tensor:
    if not size:
        return torch.empty(0, dtype=torch.uint8)
    try:
        return torch.from_file(str(file), shared=False, size=size, dtype=torch.uint8)
    except RuntimeError as error:  # torch's error for a file that is missing, too short, or cannot be mapped
        raise OSError(str(error)) from error
