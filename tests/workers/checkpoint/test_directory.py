"""The folder of snapshots: every snapshot in it is whole, whenever its writer was killed."""

import errno
import json
import os
import resource
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from stageline.pipeline.stage.stage_state import StageState
from stageline.workers.checkpoint.directory import SnapshotDirectory, SnapshotFailed, SnapshotsDiffer
from stageline.workers.checkpoint.snapshot import (
    AVERAGES,
    MANIFEST,
    TRAINING,
    WEIGHTS,
    Origin,
    Snapshot,
    SnapshotDamaged,
)
from support.states import difference, make_state

ORIGIN = Origin("digits-1", "5fa0" * 16)
STATES = [make_state(0), make_state(1)]


@pytest.fixture
def checkpoints(tmp_path: Path) -> SnapshotDirectory:
    return SnapshotDirectory(tmp_path / "runs" / "digits-1" / "checkpoints", ORIGIN)


def write(
    checkpoints: SnapshotDirectory, *places: tuple[int, int], incarnation: int = 1, state: StageState = STATES[0]
) -> None:
    for stage, step in places:
        checkpoints.write(Snapshot(stage, step, incarnation, state))


def everything(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


def test_a_written_snapshot_can_be_loaded_and_no_draft_is_left(checkpoints):
    path = checkpoints.write(Snapshot(1, 120, 3, STATES[0], {119: 0.5}))
    assert path == checkpoints.folder / "stage-1" / "step-0000000120"
    assert everything(checkpoints.folder / "stage-1") == {
        path.name,
        *(f"{path.name}/{name}" for name in (MANIFEST, WEIGHTS, AVERAGES, TRAINING)),
    }
    back = checkpoints.load(1, 120)
    assert not difference(back.state, STATES[0])
    assert back.losses == {119: 0.5}


def test_all_of_a_snapshot_is_on_the_disk_before_it_has_its_name(checkpoints, monkeypatch):
    events: list[str] = []
    fsync, rename = os.fsync, Path.replace

    def noted_fsync(descriptor: int) -> None:
        fsync(descriptor)
        events.append(os.readlink(f"/proc/self/fd/{descriptor}"))

    def noted_rename(path: Path, target: Path) -> Path:
        events.append("renamed")
        return rename(path, target)

    monkeypatch.setattr(os, "fsync", noted_fsync)
    monkeypatch.setattr(Path, "replace", noted_rename)
    home = checkpoints.write(Snapshot(0, 20, 1, STATES[0])).parent
    before, after = events[: events.index("renamed")], events[events.index("renamed") + 1 :]
    drafts = [Path(event).relative_to(home).parts[1:] for event in before if event.startswith(f"{home}/")]
    assert sorted(drafts) == [(), (AVERAGES,), (MANIFEST,), (TRAINING,), (WEIGHTS,)]
    assert {str(home.parent), str(home.parent.parent)} <= set(before)  # they are new, too
    assert after == [str(home)]


def test_steps_are_ordered_as_numbers_however_many_digits_they_have(checkpoints):
    write(checkpoints, (0, 9), (0, 10**10), (0, 10**9))
    (checkpoints.folder / "stage-0" / "step-by-step").mkdir()
    assert checkpoints.steps(0) == [9, 10**9, 10**10]


def test_a_snapshot_of_another_plan_is_refused_by_name(checkpoints):
    write(checkpoints, (0, 20), (0, 40))
    other = SnapshotDirectory(checkpoints.folder, Origin("digits-1", "c0de" * 16))
    with pytest.raises(SnapshotDamaged, match="another plan"):
        other.load(0, 20)


def test_only_what_is_older_than_the_complete_checkpoint_is_deleted(checkpoints):
    write(checkpoints, *((stage, step) for stage in range(2) for step in (0, 20, 40, 60)))
    checkpoints.delete_before(0, 40)
    checkpoints.delete_before(0, 40)
    assert checkpoints.steps(0) == [40, 60]
    assert checkpoints.steps(1) == [0, 20, 40, 60]
    assert not list(checkpoints.folder.glob("*/.*"))


def test_the_newest_two_stay_whatever_is_said_to_be_complete(checkpoints):
    write(checkpoints, *((0, step) for step in (0, 20, 40, 60)))
    checkpoints.delete_before(0, 10**6)
    assert checkpoints.steps(0) == [40, 60]


def test_a_run_that_is_resumed_as_a_whole_deletes_what_is_newer(checkpoints):
    write(checkpoints, (0, 20), (0, 40), (0, 60))
    write(checkpoints, (0, 80), incarnation=9)
    checkpoints.delete_after(0, 40, since=8)
    assert checkpoints.steps(0) == [20, 40, 80]  # incarnation 9 has written that since


def test_the_next_owner_may_come_to_the_same_state_again(checkpoints):
    write(checkpoints, (0, 20))
    write(checkpoints, (0, 20), incarnation=2)
    assert checkpoints.verify(0, 20) == []
    assert checkpoints.load(0, 20).incarnation == 1


def test_another_state_at_the_same_step_is_refused_and_changes_nothing(checkpoints):
    write(checkpoints, (0, 20))
    with pytest.raises(SnapshotsDiffer, match=r"stage 0 came to step 20 with other bits than before.*incarnation 1"):
        write(checkpoints, (0, 20), incarnation=2, state=STATES[1])
    assert not difference(checkpoints.load(0, 20).state, STATES[0])
    assert not list(checkpoints.folder.glob("*/.*"))


@pytest.mark.parametrize("name", [MANIFEST, WEIGHTS, AVERAGES, TRAINING])
def test_a_damaged_snapshot_is_replaced(checkpoints, name):
    write(checkpoints, (0, 20))
    (checkpoints.path(0, 20) / name).write_bytes(b"")
    write(checkpoints, (0, 20), incarnation=2, state=STATES[1])
    assert not difference(checkpoints.load(0, 20).state, STATES[1])
    assert not list(checkpoints.folder.glob("*/.*"))


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """No file of this process may become longer, as on a disk that is full."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("size", [0, 100, 100_000])
def test_a_full_disk_is_reported_and_leaves_nothing_behind(checkpoints, size):
    write(checkpoints, (0, 20))
    big = StageState({"0.weight": torch.zeros(100_000)})
    with (
        files_of_at_most(size),
        pytest.raises(
            SnapshotFailed, match=r"stage 0 could not write its snapshot of step 40 to .*stage-0: .*too large"
        ),
    ):
        write(checkpoints, (0, 40), state=big)
    assert checkpoints.steps(0) == [20]
    assert not list(checkpoints.folder.glob("*/.*"))
    write(checkpoints, (0, 40), state=big)


def test_a_folder_that_cannot_be_written_to_is_reported(tmp_path):
    # A file in its place stops root too, whom no permission does.
    (tmp_path / "checkpoints").write_text("")
    with pytest.raises(SnapshotFailed, match=r"stage 0 could not write .*checkpoints"):
        write(SnapshotDirectory(tmp_path / "checkpoints", ORIGIN), (0, 0))


@pytest.mark.parametrize(("kills", "at_least"), [pytest.param("boundaries", 90, marks=pytest.mark.slow), ("30", 30)])
def test_a_writer_that_is_killed_leaves_whole_snapshots_or_none(fork_server, tmp_path, kills, at_least):
    with closing(fork_server.call("support.snapshot_killer:main", tmp_path, kills)) as killer:
        told, errors = killer.communicate()
    assert killer.returncode == 0, errors
    reports = [json.loads(line) for line in told.splitlines()]
    assert sum(report["killed"] for report in reports) >= at_least
    assert sum(bool(report["unfinished"]) for report in reports) > at_least / 4  # in the middle of something
    assert not [report for report in reports if report["wrong"]]
    assert not [report for report in reports if any(name.startswith(".") for name in report["afterwards"])]
    if kills == "boundaries":
        assert {tuple(report["steps"]) for report in reports} == {(), (0,), (0, 20), (0, 20, 40), (20, 40)}


@contextmanager
def few_descriptors(left: int) -> Iterator[None]:
    """So many more files can be opened."""
    before, used = resource.getrlimit(resource.RLIMIT_NOFILE), [os.open(os.devnull, os.O_RDONLY) for _ in range(left)]
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + 1, before[1]))
    holes = []
    with suppress(OSError):
        while True:
            holes.append(os.open(os.devnull, os.O_RDONLY))
    for descriptor in used:
        os.close(descriptor)
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
        for descriptor in holes:
            os.close(descriptor)


def test_a_snapshot_that_lacks_descriptors_to_be_read_is_not_taken_for_a_damaged_one(checkpoints):
    write(checkpoints, (0, 20))
    with few_descriptors(0):
        for look in (checkpoints.verify, checkpoints.load):
            with pytest.raises(OSError, match="Too many open files"):
                look(0, 20)
    assert checkpoints.verify(0, 20) == []


@pytest.mark.parametrize("left", range(4))
def test_a_snapshot_that_lacks_descriptors_to_be_written_leaves_nothing_once_it_is_written_again(checkpoints, left):
    """Also the folder of a draft needs a descriptor to be removed."""
    write(checkpoints, (0, 20))
    with few_descriptors(left), suppress(SnapshotFailed):
        write(checkpoints, (0, 40))
    write(checkpoints, (0, 40))
    assert [path.name for path in (checkpoints.folder / "stage-0").iterdir() if path.name.startswith(".")] == []
    assert checkpoints.verify(0, 40) == []


FROZEN = replace(STATES[0], optimizer=None, parameters=(), lr_scheduler=None)


def _same_file(checkpoints: SnapshotDirectory, one: int, other: int) -> bool:
    return (checkpoints.path(0, one) / WEIGHTS).samefile(checkpoints.path(0, other) / WEIGHTS)


def test_weights_that_nothing_trains_are_written_twice_and_then_shared_with_the_last_snapshot_but_one(checkpoints):
    for step in (10, 20, 30, 40):
        write(checkpoints, (0, step), state=FROZEN)
    assert [_same_file(checkpoints, *pair) for pair in ((10, 20), (10, 30), (20, 40), (30, 40))] == [
        *(False, True),
        *(True, False),
    ]
    checkpoints.delete_before(0, 30)
    assert not difference(checkpoints.load(0, 30).state, FROZEN)
    assert not checkpoints.verify(0, 40)


def test_weights_are_written_again_where_the_file_to_share_is_damaged(checkpoints):
    write(checkpoints, (0, 10), (0, 20), state=FROZEN)
    path = checkpoints.path(0, 10) / WEIGHTS
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    write(checkpoints, (0, 30), state=FROZEN)
    assert not _same_file(checkpoints, 10, 30)
    assert not difference(checkpoints.load(0, 30).state, FROZEN)


@pytest.mark.parametrize("state", STATES, ids=["the same weights", "others"])
def test_weights_that_are_trained_are_always_written(checkpoints, state):
    write(checkpoints, (0, 10), (0, 20), state=STATES[0])
    write(checkpoints, (0, 30), state=state)
    assert not _same_file(checkpoints, 10, 30)


def test_a_buffer_that_has_changed_in_a_frozen_stage_is_written(checkpoints):
    changed = {**FROZEN.weights, "4.count": FROZEN.weights["4.count"] + 1}
    write(checkpoints, (0, 10), (0, 20), state=FROZEN)
    write(checkpoints, (0, 30), state=replace(FROZEN, weights=changed))
    assert not _same_file(checkpoints, 10, 30)
    assert not difference(checkpoints.load(0, 30).state, replace(FROZEN, weights=changed))


def test_without_hard_links_they_are_written(checkpoints, monkeypatch):
    monkeypatch.setattr(os, "link", Mock(side_effect=OSError(errno.EPERM, "Operation not permitted")))
    write(checkpoints, (0, 10), (0, 20), (0, 30), state=FROZEN)
    assert not _same_file(checkpoints, 10, 30)
    assert not difference(checkpoints.load(0, 30).state, FROZEN)
