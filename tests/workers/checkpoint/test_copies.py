"""Snapshots go from disk to disk in chunks: the copy is the same folder, and what is damaged on the way is none."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from stageline.broker.control.checkpoints import CopyState
from stageline.pipeline.retry import ResourceFault
from stageline.pipeline.stage.stage_state import StageState
from stageline.workers.checkpoint.copies import LEAST, DiskCopies
from stageline.workers.checkpoint.directory import SnapshotDirectory, SnapshotFailed
from stageline.workers.checkpoint.snapshot import (
    MANIFEST,
    UNSEALED,
    Origin,
    Snapshot,
    read_manifest,
    write_manifest,
)
from support.workspace import wait_for

ORIGIN = Origin("run", "d" * 64)


def snapshot(step: int = 40, *, of: float = 1.0, size: int = 3 * LEAST // 4) -> Snapshot:
    weights = {"a": torch.arange(size, dtype=torch.float32) * of, "b": torch.ones(3)}
    return Snapshot(1, step, 7, StageState(weights, optimizer={"state": {}, "param_groups": []}), {0: 0.5})


@pytest.fixture
def owner(tmp_path: Path) -> Iterator[DiskCopies]:
    with DiskCopies(SnapshotDirectory(tmp_path / "owner", ORIGIN)) as store:
        yield store


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[DiskCopies]:
    with DiskCopies(SnapshotDirectory(tmp_path / "holder", ORIGIN)) as store:
        yield store


def parts_of(owner: DiskCopies, step: int = 40) -> list[Any]:
    found = owner.parts(1, step)
    assert found is not None
    return [found.part(place) for place in range(found.count)]


def receive(holder: DiskCopies, parts: list[Any], step: int = 40) -> CopyState | None:
    """How the transfer of these parts ends."""
    draft = holder.draft(1, step, parts[0])
    assert draft is not None
    assert draft.count == len(parts)
    for part in parts[1:]:
        wait_for(lambda: draft.has_room or draft.outcome is not None)
        if draft.outcome is not None:
            break
        draft.add(part)
    wait_for(lambda: draft.outcome is not None)
    return draft.outcome


def test_a_copy_is_the_same_folder_byte_for_byte(tmp_path: Path, owner: DiskCopies, holder: DiskCopies) -> None:
    there = SnapshotDirectory(tmp_path / "owner", ORIGIN).write(snapshot())
    parts = parts_of(owner)
    assert len(parts) > 3
    assert receive(holder, parts) is CopyState.DONE
    here = SnapshotDirectory(tmp_path / "holder", ORIGIN)
    assert here.verify(1, 40) == []
    assert torch.equal(here.load(1, 40).state.weights["a"], snapshot().state.weights["a"])
    files = {path.name: path.read_bytes() for path in there.iterdir()}
    assert {path.name: path.read_bytes() for path in here.path(1, 40).iterdir()} == files


def test_a_snapshot_that_is_deleted_while_it_is_sent_arrives_whole(
    tmp_path: Path, owner: DiskCopies, holder: DiskCopies
) -> None:
    directory = SnapshotDirectory(tmp_path / "owner", ORIGIN)
    for step in (20, 40, 60, 80):
        directory.write(snapshot(step))
    sent = owner.parts(1, 20)
    directory.delete_before(1, 60)
    assert directory.steps(1) == [60, 80]
    assert sent is not None
    assert receive(holder, [sent.part(place) for place in range(sent.count)], 20) is CopyState.DONE


def test_a_copy_that_was_damaged_on_the_way_is_no_snapshot(
    tmp_path: Path, owner: DiskCopies, holder: DiskCopies
) -> None:
    SnapshotDirectory(tmp_path / "owner", ORIGIN).write(snapshot())
    parts = parts_of(owner)
    parts[2] = tuple(piece.clone().add_(1) for piece in parts[2])
    assert receive(holder, parts) is CopyState.FAILED
    assert SnapshotDirectory(tmp_path / "holder", ORIGIN).present() == []


def test_what_is_no_manifest_begins_no_copy(holder: DiskCopies) -> None:
    assert holder.draft(1, 40, (torch.zeros(9, dtype=torch.uint8),)) is None
    assert holder.draft(1, 40, "text") is None


def test_a_holder_that_comes_back_with_its_disk_takes_no_chunk_again(
    tmp_path: Path, owner: DiskCopies, holder: DiskCopies
) -> None:
    for name in ("owner", "holder"):
        SnapshotDirectory(tmp_path / name, ORIGIN).write(snapshot())
    draft = holder.draft(1, 40, parts_of(owner)[0])
    assert draft is not None
    wait_for(lambda: draft.outcome is CopyState.DONE)


def test_a_damaged_snapshot_is_replaced_by_its_copy(tmp_path: Path, owner: DiskCopies) -> None:
    SnapshotDirectory(tmp_path / "owner", ORIGIN).write(snapshot())
    damaged = SnapshotDirectory(tmp_path / "damaged", ORIGIN)
    weights = damaged.write(snapshot()) / "weights.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\x7f")
    with DiskCopies(damaged, [(1, 40)]) as store:
        assert not store.has(1, 40)
        assert store.parts(1, 40) is None
        assert receive(store, parts_of(owner)) is CopyState.DONE
        assert store.has(1, 40)
    assert damaged.verify(1, 40) == []


def test_copies_are_deleted_below_the_checkpoint_that_was_announced_before(tmp_path: Path) -> None:
    directory = SnapshotDirectory(tmp_path, ORIGIN)
    for step in (20, 40, 60, 80):
        directory.write(snapshot(step))
    with DiskCopies(directory) as store:
        store.forget(1, 60, None)
        store.forget(1, 80, None)
        wait_for(lambda: directory.steps(1) == [60, 80])


def test_drafts_of_killed_processes_are_cleared(tmp_path: Path, owner: DiskCopies, holder: DiskCopies) -> None:
    SnapshotDirectory(tmp_path / "owner", ORIGIN).write(snapshot())
    left = tmp_path / "holder" / "stage-1" / ".step-0000000040-00c0ffee"
    left.mkdir(parents=True)
    assert receive(holder, parts_of(owner)) is CopyState.DONE
    assert not left.exists()


def test_a_holder_whose_disk_is_full_says_so_and_then_fails(
    tmp_path: Path, owner: DiskCopies, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The failure was called a bug, or was not told at all: no checkpoint became complete, and nothing said why."""
    monkeypatch.setattr("stageline.pipeline.retry.BOUND", 0.3)
    notes: list[ResourceFault | None] = []
    SnapshotDirectory(tmp_path / "owner", ORIGIN).write(snapshot())
    with DiskCopies(SnapshotDirectory(tmp_path / "holder", ORIGIN), note=notes.append) as store:
        parts = parts_of(owner)
        draft = store.draft(1, 40, parts[0])
        assert draft is not None
        wait_for(lambda: draft.has_room)
        (folder,) = (tmp_path / "holder" / "stage-1").iterdir()
        for path in folder.glob("*.safetensors"):
            path.unlink(), path.symlink_to("/dev/full")
        draft.add(parts[1])
        with pytest.raises(SnapshotFailed, match=r"stage 1.* step 40 .*No space left on device") as failed:
            wait_for(lambda: draft.outcome is not None)
    assert "bug" not in str(failed.value)
    assert notes
    assert notes[0] is not None
    assert "No space left" in notes[0].told(0.0)


def test_a_chunk_with_more_bytes_than_were_announced_is_refused(
    tmp_path: Path, owner: DiskCopies, holder: DiskCopies
) -> None:
    """The holder failed, and the run with it, as of a bug."""
    SnapshotDirectory(tmp_path / "owner", ORIGIN).write(snapshot())
    *others, last = parts_of(owner)
    longer = (*last[:-1], torch.cat([last[-1], torch.zeros(9, dtype=torch.uint8)]))
    assert receive(holder, [*others, longer]) is CopyState.FAILED
    assert SnapshotDirectory(tmp_path / "holder", ORIGIN).present() == []


def test_a_manifest_with_a_negative_size_begins_no_copy(tmp_path: Path, holder: DiskCopies) -> None:
    """The transfer never ended: no chunk was the last one."""
    there = SnapshotDirectory(tmp_path / "owner", ORIGIN).write(snapshot())
    manifest = read_manifest(there)
    files = {name: msgspec.structs.replace(of, bytes=-(2**30)) for name, of in manifest.files.items()}
    write_manifest(there, msgspec.structs.replace(manifest, files=files, sha256=UNSEALED))
    data = torch.frombuffer(bytearray((there / MANIFEST).read_bytes()), dtype=torch.uint8)
    assert holder.draft(1, 40, (data,)) is None


@pytest.mark.parametrize("damage", [lambda path: os.truncate(path, 100), Path.unlink], ids=["short", "missing"])
def test_a_snapshot_with_a_file_that_is_short_or_missing_is_not_sent(
    tmp_path: Path, owner: DiskCopies, damage: Callable[[Path], None]
) -> None:
    """torch raises RuntimeError, which ended the owner."""
    damage(SnapshotDirectory(tmp_path / "owner", ORIGIN).write(snapshot()) / "weights.safetensors")
    assert owner.parts(1, 40) is None
