"""Snapshots are written behind the compute loop's back; none is dropped, and a failure is raised."""

import threading
from contextlib import closing
from pathlib import Path

import pytest
import torch

from stageline.pipeline.stage.state import StageState
from stageline.workers.checkpoint.directory import SnapshotDirectory, SnapshotFailed
from stageline.workers.checkpoint.hooks import SnapshotWriter
from stageline.workers.checkpoint.snapshot import Origin, Snapshot
from support.states import difference, make_state

ORIGIN = Origin("digits-1", "5fa0" * 16)
SMALL = StageState({"0.weight": torch.ones(3)})


class GatedDirectory(SnapshotDirectory):
    """A disk as slow as a test wants: each snapshot is written when the gate lets it."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, ORIGIN)
        self.reached = threading.Semaphore(0)
        self.open = threading.Semaphore(0)

    def write(self, snapshot: Snapshot) -> Path:
        self.reached.release()
        assert self.open.acquire(timeout=30)
        return super().write(snapshot)


def snapshot(step: int, stage: int = 0, state: StageState = SMALL) -> Snapshot:
    return Snapshot(stage, step, 1, state)


def test_what_was_handed_over_is_on_disk_when_it_is_reported(tmp_path):
    checkpoints = SnapshotDirectory(tmp_path, ORIGIN)
    reported: list[tuple[int, int, list[str]]] = []

    def durable(stage: int, step: int) -> None:
        reported.append((stage, step, SnapshotDirectory(tmp_path, ORIGIN).verify(stage, step)))

    with closing(SnapshotWriter(checkpoints, (0, 3), durable)) as writer:
        for step in (0, 20, 40):
            for stage in (0, 3):
                assert writer.has_room(stage, 30)
                writer.write(snapshot(step, stage, make_state(step)))
        assert writer.flush()
    assert sorted(reported) == [(stage, step, []) for stage in (0, 3) for step in (0, 20, 40)]
    assert [step for stage, step, _ in reported if stage == 3] == [0, 20, 40]
    assert not difference(checkpoints.load(3, 20).state, make_state(20))


def test_the_compute_loop_goes_on_while_one_is_written_and_one_waits(tmp_path):
    gate = GatedDirectory(tmp_path)
    durable: list[int] = []
    writer = SnapshotWriter(gate, (0, 1), lambda stage, step: durable.append(step))
    writer.write(snapshot(20))
    assert gate.reached.acquire(timeout=30)
    assert writer.doing == f"writing the snapshot of step 20 to {gate.path(0, 20)}"
    assert writer.has_room(0)
    writer.write(snapshot(40))
    assert not writer.has_room(0, 0.01)
    assert writer.has_room(1)
    assert not writer.flush(0.01)
    gate.open.release()
    assert writer.has_room(0, 30)
    writer.write(snapshot(60))
    gate.open.release(2)
    assert writer.flush(30)
    assert durable == [20, 40, 60]
    writer.close()


def test_only_an_announced_checkpoint_lets_older_ones_go(tmp_path):
    checkpoints = SnapshotDirectory(tmp_path, ORIGIN)
    SnapshotDirectory(tmp_path, ORIGIN).write(snapshot(20, stage=1))  # another worker's
    with closing(SnapshotWriter(checkpoints, (0,), lambda stage, step: None)) as writer:
        for step in (0, 20, 40, 60, 80):
            assert writer.has_room(0, 30)
            writer.write(snapshot(step))
        assert writer.flush()
        assert checkpoints.steps(0) == [0, 20, 40, 60, 80]
        writer.delete_before(60)
        writer.delete_before(40)  # announced late
        assert writer.flush()
        assert checkpoints.steps(0) == [60, 80]
        assert checkpoints.steps(1) == [20]


def test_what_killed_writers_left_is_cleared_away_for_the_writers_own_stages(tmp_path):
    for stage in (0, 1):
        (tmp_path / f"stage-{stage}" / ".step-0000000020-1f0c").mkdir(parents=True)
    with closing(SnapshotWriter(SnapshotDirectory(tmp_path, ORIGIN), (0,), lambda stage, step: None)) as writer:
        writer.write(snapshot(20))
    assert not list(tmp_path.glob("stage-0/.*"))
    assert list(tmp_path.glob("stage-1/.*"))


def test_a_failure_reaches_the_owner_and_every_later_call(tmp_path):
    durable: list[int] = []
    writer = SnapshotWriter(SnapshotDirectory(tmp_path, ORIGIN), (1, 0), lambda stage, step: durable.append(step))
    writer.write(snapshot(20, stage=1))
    assert writer.flush(30)
    (tmp_path / "stage-0").write_text("")  # a folder cannot be made there
    writer.write(snapshot(20))
    with pytest.raises(SnapshotFailed, match="stage 0 could not write its snapshot of step 20"):
        writer.flush(30)
    for call in (lambda: writer.has_room(1), lambda: writer.write(snapshot(40, stage=1)), writer.flush):
        with pytest.raises(SnapshotFailed, match="stage 0 could not"):
            call()
    writer.close()
    assert durable == [20]


def test_a_state_that_cannot_be_written_is_a_failure_like_others(tmp_path):
    odd = StageState({}, optimizer={"state": object()})
    with closing(SnapshotWriter(SnapshotDirectory(tmp_path, ORIGIN), (0,), lambda stage, step: None)) as writer:
        writer.write(snapshot(0, state=odd))
        with pytest.raises(SnapshotFailed, match=r"optimizer\.state is of type builtins\.object"):
            writer.flush()


def test_a_bug_in_the_thread_is_reported_as_one(tmp_path):
    def durable(stage: int, step: int) -> None:
        raise ZeroDivisionError("by accident")

    writer = SnapshotWriter(SnapshotDirectory(tmp_path, ORIGIN), (0,), durable)
    writer.write(snapshot(0))
    with pytest.raises(SnapshotFailed, match=r"a bug in stageline .*ZeroDivisionError: by accident"):
        writer.flush(30)
    writer.close()


def test_closing_waits_for_what_was_handed_over_or_leaves_it(tmp_path):
    gate = GatedDirectory(tmp_path)
    writer = SnapshotWriter(gate, (0,), lambda stage, step: None)
    writer.write(snapshot(20))
    assert gate.reached.acquire(timeout=30)
    writer.write(snapshot(40))
    writer.close(timeout=0.01)
    gate.open.release(2)
    for thread in threading.enumerate():
        if thread.name == "snapshots":
            thread.join(30)
    assert gate.steps(0) == [20]


def test_a_folder_that_cannot_be_used_is_reported_before_the_first_snapshot(tmp_path):
    (tmp_path / "stage-0").write_text("")
    writer = SnapshotWriter(SnapshotDirectory(tmp_path, ORIGIN), (0,), lambda stage, step: None)
    writer.close()
    with pytest.raises(SnapshotFailed, match=r"stage 0 cannot keep its snapshots there: .*Not a directory"):
        writer.has_room(0)
