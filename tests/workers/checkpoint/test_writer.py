"""The keeper writes behind the compute loop's back, drops nothing, and tells what it could not do."""

import threading
from pathlib import Path

import pytest
import torch

from stageline.pipeline.stage.state import StageState
from stageline.workers.checkpoint.directory import SnapshotDirectory, SnapshotFailed
from stageline.workers.checkpoint.manifest import Origin
from stageline.workers.checkpoint.snapshot import Snapshot
from stageline.workers.checkpoint.writer import NoRoom, SnapshotWriter
from support.states import difference, make_state

ORIGIN = Origin("digits-1", "5fa0" * 16)
SMALL = StageState({"0.weight": torch.ones(3)})


class Gate(SnapshotDirectory):
    """A disk as slow as a test wants: each snapshot is written when the gate lets it."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, ORIGIN)
        self.reached = threading.Semaphore(0)
        self.open = threading.Semaphore(0)

    def place(self, snapshot: Snapshot) -> Path:
        self.reached.release()
        assert self.open.acquire(timeout=30)
        return super().place(snapshot)


def snapshot(step: int, stage: int = 0, state: StageState = SMALL) -> Snapshot:
    return Snapshot(stage, step, 1, state)


def test_what_was_handed_over_is_on_disk_when_it_is_reported(tmp_path):
    checkpoints = SnapshotDirectory(tmp_path, ORIGIN)
    reported: list[tuple[int, int, list[str]]] = []

    def durable(stage: int, step: int) -> None:
        reported.append((stage, step, SnapshotDirectory(tmp_path, ORIGIN).verify(stage, step)))

    with SnapshotWriter(checkpoints, (0, 3), durable) as keeper:
        for step in (0, 20, 40):
            for stage in (0, 3):
                assert keeper.room(stage, 30)
                keeper.keep(snapshot(step, stage, make_state(step)))
        assert keeper.flush()
    assert sorted(reported) == [(stage, step, []) for stage in (0, 3) for step in (0, 20, 40)]
    assert [step for stage, step, _ in reported if stage == 3] == [0, 20, 40]
    assert not difference(checkpoints.load(3, 20).state, make_state(20))


def test_the_compute_loop_goes_on_while_one_is_written_and_one_waits(tmp_path):
    gate = Gate(tmp_path)
    durable: list[int] = []
    keeper = SnapshotWriter(gate, (0, 1), lambda stage, step: durable.append(step))
    keeper.keep(snapshot(20))
    assert gate.reached.acquire(timeout=30)
    assert keeper.doing == f"writing the snapshot of step 20 to {gate.path(0, 20)}"
    assert keeper.room(0)
    keeper.keep(snapshot(40))
    assert not keeper.room(0, 0.01)
    assert keeper.room(1)
    with pytest.raises(NoRoom, match="stage 0 hands over step 60 before there is room"):
        keeper.keep(snapshot(60))
    assert not keeper.flush(0.01)
    gate.open.release()
    assert keeper.room(0, 30)
    keeper.keep(snapshot(60))
    gate.open.release(2)
    assert keeper.flush(30)
    assert durable == [20, 40, 60]
    keeper.close()


def test_only_an_announced_checkpoint_lets_older_ones_go(tmp_path):
    checkpoints = SnapshotDirectory(tmp_path, ORIGIN)
    SnapshotDirectory(tmp_path, ORIGIN).place(snapshot(20, stage=1))  # another worker's
    with SnapshotWriter(checkpoints, (0,), lambda stage, step: None) as keeper:
        for step in (0, 20, 40, 60, 80):
            assert keeper.room(0, 30)
            keeper.keep(snapshot(step))
        assert keeper.flush()
        assert checkpoints.steps(0) == [0, 20, 40, 60, 80]
        keeper.forget(60)
        keeper.forget(40)  # news that came late
        assert keeper.flush()
        assert checkpoints.steps(0) == [60, 80]
        assert checkpoints.steps(1) == [20]


def test_what_killed_writers_left_is_cleared_away_for_the_keepers_own_stages(tmp_path):
    for stage in (0, 1):
        (tmp_path / f"stage-{stage}" / ".step-0000000020-1f0c").mkdir(parents=True)
    with SnapshotWriter(SnapshotDirectory(tmp_path, ORIGIN), (0,), lambda stage, step: None) as keeper:
        keeper.keep(snapshot(20))
    assert not list(tmp_path.glob("stage-0/.*"))
    assert list(tmp_path.glob("stage-1/.*"))


def test_a_failure_reaches_the_owner_and_every_later_call(tmp_path):
    told: list[SnapshotFailed] = []
    durable: list[int] = []
    keeper = SnapshotWriter(
        SnapshotDirectory(tmp_path, ORIGIN), (1, 0), lambda stage, step: durable.append(step), told.append
    )
    keeper.keep(snapshot(20, stage=1))
    assert keeper.flush(30)
    (tmp_path / "stage-0").write_text("")  # a folder cannot be made there
    keeper.keep(snapshot(20))
    with pytest.raises(SnapshotFailed, match="stage 0 could not write its snapshot of step 20"):
        keeper.flush(30)
    for call in (lambda: keeper.room(1), lambda: keeper.keep(snapshot(40, stage=1)), keeper.flush):
        with pytest.raises(SnapshotFailed):
            call()
    keeper.close()
    assert [str(error).partition(" could")[0] for error in told] == ["stage 0"]
    assert durable == [20]


def test_a_state_that_cannot_be_written_is_a_failure_like_others(tmp_path):
    odd = StageState({}, optimizer={"state": object()})
    told: list[SnapshotFailed] = []
    with SnapshotWriter(SnapshotDirectory(tmp_path, ORIGIN), (0,), lambda stage, step: None, told.append) as keeper:
        keeper.keep(snapshot(0, state=odd))
    assert "optimizer.state is of type builtins.object" in str(told[0])


def test_a_bug_in_the_thread_is_told_as_one(tmp_path):
    def durable(stage: int, step: int) -> None:
        raise ZeroDivisionError("by accident")

    keeper = SnapshotWriter(SnapshotDirectory(tmp_path, ORIGIN), (0,), durable)
    keeper.keep(snapshot(0))
    with pytest.raises(SnapshotFailed, match=r"a bug in stageline .*ZeroDivisionError: by accident"):
        keeper.flush(30)
    keeper.close()


def test_closing_waits_for_what_was_handed_over_or_leaves_it(tmp_path):
    gate = Gate(tmp_path)
    keeper = SnapshotWriter(gate, (0,), lambda stage, step: None)
    keeper.keep(snapshot(20))
    assert gate.reached.acquire(timeout=30)
    keeper.keep(snapshot(40))
    keeper.close(timeout=0.01)
    gate.open.release(2)
    for thread in threading.enumerate():
        if thread.name == "keeper":
            thread.join(30)
    assert gate.steps(0) == [20]


def test_a_folder_that_cannot_be_used_is_told_before_the_first_snapshot(tmp_path):
    (tmp_path / "stage-0").write_text("")
    keeper = SnapshotWriter(SnapshotDirectory(tmp_path, ORIGIN), (0,), lambda stage, step: None)
    keeper.close()
    with pytest.raises(SnapshotFailed, match=r"stage 0 cannot keep its snapshots there: .*Not a directory"):
        keeper.room(0)
