"""Snapshots are written behind the compute loop's back; none is dropped, and a failure is raised."""

import errno
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from stageline.broker.control.messages import Assigned
from stageline.pipeline import retry
from stageline.pipeline.errors import ForeignState
from stageline.pipeline.plan import read_plan
from stageline.pipeline.stage.stage_state import StageState
from stageline.workers.checkpoint import hooks as checkpoint_hooks
from stageline.workers.checkpoint.directory import SnapshotDirectory, SnapshotFailed
from stageline.workers.checkpoint.hooks import Rhythm, SnapshotHooks, restore
from stageline.workers.checkpoint.inventory import LocalSnapshots
from stageline.workers.checkpoint.snapshot import Origin, Snapshot
from stageline.workers.disk.background_writer import BackgroundWriter
from stageline.workers.runtime.calls import Position
from stageline.workers.runtime.idle import Done
from stageline.workers.runtime.progress import Progress
from stageline.workers.runtime.worker_feature import WorkerFeature
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


class FullDirectory(SnapshotDirectory):
    """A disk with room for three snapshots."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, ORIGIN)

    def write(self, snapshot: Snapshot) -> Path:
        if len(self.steps(snapshot.stage)) == 3:
            raise OSError(errno.ENOSPC, "No space left on device")
        return super().write(snapshot)


class KnownStage:
    """A stage whose snapshot is `state`."""

    def __init__(self, state: StageState) -> None:
        self.state = state

    def snapshot(self) -> StageState:
        return self.state


class Watched(SnapshotHooks):
    """Hooks for snapshots every 20 steps, with what a test looks at."""

    def __init__(
        self,
        snapshots: SnapshotDirectory,
        stages: tuple[int, ...],
        durable: Callable[[int, int], None] | None = None,
        **options: object,
    ) -> None:
        self.states = {stage: KnownStage(SMALL) for stage in stages}
        self.progress = Progress(last=9)
        self.writer = BackgroundWriter("snapshots", limit=1)
        if durable is not None:
            self.progress.snapshots = Calling(durable)
        super().__init__(
            self.states,
            self.progress,
            snapshots,
            self.writer,
            Rhythm(steps=1000, every=20, log_every=1),
            incarnation=1,
            start=Position(20),
            **options,
        )

    def write(self, step: int, stage: int = 0, state: StageState = SMALL) -> None:
        """Finishes the step before `step`, with this state."""
        self.states[stage].state = state
        self.stepped(stage, step - 1, None)


class Calling:
    """Takes the place of `Progress.snapshots`: calls instead of appending."""

    def __init__(self, called: Callable[[int, int], None]) -> None:
        self.called = called

    def append(self, place: tuple[int, int]) -> None:
        self.called(*place)


def test_what_was_handed_over_is_on_disk_when_it_is_reported(tmp_path):
    checkpoints = SnapshotDirectory(tmp_path, ORIGIN)
    reported: list[tuple[int, int, list[str]]] = []

    def durable(stage: int, step: int) -> None:
        reported.append((stage, step, SnapshotDirectory(tmp_path, ORIGIN).verify(stage, step)))

    with Watched(checkpoints, (0, 3), durable) as hooks:
        for step in (20, 40, 60):
            for stage in (0, 3):
                hooks.write(step, stage, make_state(step))
        hooks.flush()
    assert sorted(reported) == [(stage, step, []) for stage in (0, 3) for step in (20, 40, 60)]
    assert [step for stage, step, _ in reported if stage == 3] == [20, 40, 60]
    assert not difference(checkpoints.load(3, 40).state, make_state(40))


def test_the_compute_loop_goes_on_while_a_snapshot_is_written_up_to_the_next_of_its_stage(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint_hooks, "PATIENCE", 0.01)
    monkeypatch.setattr(checkpoint_hooks, "LONGEST_WRITE", 0.01)
    gate = GatedDirectory(tmp_path)
    hooks = Watched(gate, (0, 1))
    hooks.progress.waits = False
    hooks.write(20)
    assert gate.reached.acquire(timeout=30)
    hooks.write(20, stage=1)
    assert not hooks.progress.waits
    busy = f"still busy after 0.01 s: the worker could not write its snapshot of step 20 to {gate.path(0, 20)}"
    for call in (lambda: hooks.write(40), hooks.flush):
        with pytest.raises(SnapshotFailed, match=busy):
            call()
    gate.open.release()
    assert hooks.writer.is_done(0, 30)
    hooks.write(40)
    gate.open.release(2)
    assert hooks.writer.flush(30)
    assert hooks.progress.written == [(0, 20), (1, 20), (0, 40)]
    hooks.writer.close()


def test_where_memory_has_a_limit_the_compute_loop_goes_on_once_its_snapshot_is_written(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint_hooks, "PATIENCE", 0.01)
    monkeypatch.setattr(checkpoint_hooks, "LONGEST_WRITE", 0.01)
    gate = GatedDirectory(tmp_path)
    hooks = Watched(gate, (0, 1), waits_for=[0])
    hooks.write(20, stage=1)
    hooks.progress.waits = False
    with pytest.raises(SnapshotFailed, match=r"still busy after 0\.01 s"):
        hooks.write(20)
    gate.open.release(2)
    assert hooks.writer.flush(30)
    monkeypatch.setattr(checkpoint_hooks, "LONGEST_WRITE", 30)
    gate.open.release()
    hooks.write(40)
    assert hooks.progress.written == [(1, 20), (0, 20), (0, 40)]
    hooks.writer.close()


def test_a_run_that_stops_where_a_stage_is_already_has_its_snapshot_of_that_step_unless_more_was_begun(tmp_path):
    """Workers that wait for a script have finished the step when they learn that it is the last one."""
    checkpoints = SnapshotDirectory(tmp_path, ORIGIN)
    with Watched(checkpoints, (0, 1, 2)) as hooks:
        for stage in (0, 1, 2):
            hooks.write(27, stage, make_state(27))
            hooks.progress.finished[stage] = 27
        hooks.progress.finished[1] = 28
        hooks.progress.open[2].append(Done(None, 0.0, 0.0))  # 2F0 of the next step
        hooks.stop_at(27)
        hooks.stop_at(27)
        hooks.flush()
        assert hooks.progress.written == [(0, 27)]
        assert not difference(checkpoints.load(0, 27).state, make_state(27))


def test_only_an_announced_checkpoint_lets_older_ones_go(tmp_path):
    checkpoints = SnapshotDirectory(tmp_path, ORIGIN)
    SnapshotDirectory(tmp_path, ORIGIN).write(Snapshot(1, 20, 1, SMALL))  # another worker's
    with Watched(checkpoints, (0,)) as hooks:
        for step in (20, 40, 60, 80, 100):
            hooks.write(step)
        hooks.flush()
        assert checkpoints.steps(0) == [20, 40, 60, 80, 100]
        hooks.forget(80)
        hooks.forget(100)
        hooks.forget(60)  # announced late
        hooks.flush()
        assert checkpoints.steps(0) == [80, 100]
        assert checkpoints.steps(1) == [20]


def test_a_checkpoint_that_the_worker_has_no_snapshot_of_lets_nothing_go(tmp_path):
    """Two forged announcements, the second far beyond the first, deleted all snapshots of a stage."""
    checkpoints = SnapshotDirectory(tmp_path, ORIGIN)
    with Watched(checkpoints, (0,)) as hooks:
        for step in (20, 40, 60):
            hooks.write(step)
        hooks.flush()
        for forged in (10**6, 2 * 10**6, 61):
            assert not hooks.may_be_complete(forged)
            hooks.forget(forged)
        hooks.forget(60)
        hooks.flush()
        assert checkpoints.steps(0) == [20, 40, 60]
        SnapshotDirectory(tmp_path, ORIGIN).write(Snapshot(0, 80, 9, SMALL))  # of an incarnation before, as disks tell
        assert hooks.may_be_complete(80)


@pytest.mark.parametrize("waits_for", [(), (0,)])
def test_a_full_disk_gets_the_room_of_older_snapshots_while_the_compute_loop_waits_for_it(
    tmp_path, monkeypatch, waits_for
):
    """The loop, which alone heard that they may go, waited for the disk that was full of them: the run failed."""
    monkeypatch.setattr(retry, "BOUND", 5.0)
    checkpoints = FullDirectory(tmp_path)
    announced: list[tuple[int, None]] = []
    with Watched(checkpoints, (0,), waits_for=waits_for, announced=lambda: announced) as hooks:
        for step in (20, 40, 60):
            hooks.write(step)
        announced += [(40, None), (60, None)]
        hooks.write(80)
        hooks.flush()
        assert checkpoints.steps(0) == [40, 60, 80]


def test_the_best_checkpoint_stays_until_another_is_the_best(tmp_path):
    checkpoints = SnapshotDirectory(tmp_path, ORIGIN)
    with Watched(checkpoints, (0,)) as hooks:
        for step in (20, 40, 60, 80, 100):
            hooks.write(step)
        for complete, best, left in (
            (60, 20, [20, 40, 60, 80, 100]),
            (80, 20, [20, 60, 80, 100]),
            (100, 60, [60, 80, 100]),
        ):
            hooks.forget(complete, best)
            hooks.flush()
            assert checkpoints.steps(0) == left


def test_what_killed_writers_left_is_cleared_away_for_the_writers_own_stages(tmp_path):
    for stage in (0, 1):
        (tmp_path / f"stage-{stage}" / ".step-0000000020-1f0c").mkdir(parents=True)
    with Watched(SnapshotDirectory(tmp_path, ORIGIN), (0,)) as hooks:
        hooks.write(20)
    assert not list(tmp_path.glob("stage-0/.*"))
    assert list(tmp_path.glob("stage-1/.*"))


def test_a_failure_reaches_the_owner_and_every_later_call(tmp_path):
    hooks = Watched(SnapshotDirectory(tmp_path, ORIGIN), (1, 0))
    hooks.write(20, stage=1)
    hooks.flush()
    (tmp_path / "stage-0").write_text("")  # a folder cannot be made there
    hooks.write(20)
    with pytest.raises(SnapshotFailed, match="stage 0 could not write its snapshot of step 20"):
        hooks.flush()
    for call in (lambda: hooks.write(40, stage=1), hooks.flush):
        with pytest.raises(SnapshotFailed, match="stage 0 could not"):
            call()
    hooks.writer.close()
    assert hooks.progress.written == [(1, 20)]


def test_a_state_that_cannot_be_written_is_a_failure_like_others(tmp_path):
    odd = StageState({}, optimizer={"state": object()})
    with Watched(SnapshotDirectory(tmp_path, ORIGIN), (0,)) as hooks:
        hooks.write(20, state=odd)
        with pytest.raises(SnapshotFailed, match=r"optimizer\.state is of type builtins\.object"):
            hooks.flush()


def test_a_disk_that_does_not_take_what_was_measured_before_a_snapshot_is_a_failure_like_others(tmp_path):
    """It was told as a bug of stageline."""

    class ReadOnlyMetrics(WorkerFeature):
        def settle(self, stage: int) -> None:
            if stage == 9:  # measurements are the last stage's
                raise OSError(errno.EROFS, "Read-only file system")

    snapshots = SnapshotDirectory(tmp_path / "checkpoints", ORIGIN)
    with Watched(snapshots, (0, 9), features=[ReadOnlyMetrics()]) as hooks:
        hooks.write(40, stage=0)
        hooks.write(40, stage=9)
        with pytest.raises(SnapshotFailed, match=r"stage 9 could not write .* step 40, .*Read-only file system"):
            hooks.flush()
    assert snapshots.present() == [(0, 40)]


def test_a_bug_in_the_thread_is_reported_as_one(tmp_path):
    def durable(stage: int, step: int) -> None:
        raise ZeroDivisionError("by accident")

    hooks = Watched(SnapshotDirectory(tmp_path, ORIGIN), (0,), durable)
    hooks.write(20)
    with pytest.raises(SnapshotFailed, match=r"a bug in stageline .*ZeroDivisionError: by accident"):
        hooks.flush()
    hooks.writer.close()


def test_after_an_error_what_waits_to_be_written_is_dropped(tmp_path):
    gate = GatedDirectory(tmp_path)
    hooks = Watched(gate, (0, 1))
    hooks.write(20)
    assert gate.reached.acquire(timeout=30)
    hooks.write(20, stage=1)
    hooks.__exit__(None, ZeroDivisionError(), None)
    gate.open.release(2)
    for thread in threading.enumerate():
        if thread.name == "snapshots":
            thread.join(30)
    assert gate.present() == [(0, 20)]


def test_a_folder_that_cannot_be_used_is_reported_before_the_first_snapshot(tmp_path):
    (tmp_path / "stage-0").write_text("")
    hooks = Watched(SnapshotDirectory(tmp_path, ORIGIN), (0,))
    hooks.writer.close()
    with pytest.raises(SnapshotFailed, match=r"stage 0 cannot keep its snapshots there: .*Not a directory"):
        hooks.write(20)
    assert hooks.progress.written == []


def test_a_script_has_no_snapshots_and_begins_where_all_stages_have_theirs(tmp_path):
    plan = read_plan("examples/mlp", sets=["run.steps=20", f"run.dir={tmp_path}"], environment={}).resolved(2)
    local, script = LocalSnapshots(plan), len(plan.workers)
    checkpoints = SnapshotDirectory.of(tmp_path / "run-1", "run-1", plan)
    for stage, step in ((0, 20), (1, 20), (0, 40), (1, 40), (0, 60), (1, 60)):
        checkpoints.write(Snapshot(stage, step, 1, SMALL))
    assert local.inspect("run-1", 20, script).stages == []
    local.abandon(Assigned("run-1", script, 7, 20))
    assert local.can_begin(Assigned("run-1", script, 7, 20))
    checkpoints.delete_before(1, 40)
    assert not local.can_begin(Assigned("run-1", script, 7, 20))
    assert local.can_begin(Assigned("run-1", 0, 7, 20))


def test_a_snapshot_has_the_position_of_its_step_among_the_calls_of_a_script(tmp_path):
    checkpoints = SnapshotDirectory(tmp_path, ORIGIN)
    with Watched(checkpoints, (0, 1)) as hooks:
        hooks.progress.positions[40] = Position(40, 55, 9)
        for stage in (0, 1):
            hooks.write(40, stage)
        hooks.flush()
    assert checkpoints.load(0, 40).position == Position(40, 55, 9)


def test_a_worker_begins_at_the_position_of_its_snapshots():
    positions = {0: Position(40, 55, 9), 1: Position(40, 55, 9), 2: Position(40, 56, 9)}
    progress = Progress()

    def load(stage: int, step: int) -> Snapshot:
        position = positions[stage]
        return Snapshot(stage, step, 1, SMALL, {}, position.calls, position.evaluations)

    def begin(*stages: int) -> Position:
        return restore({stage: RestoredStage() for stage in stages}, progress, load, 40)

    assert begin(0, 1) == Position(40, 55, 9)
    with pytest.raises(ForeignState, match=r"stage 2 was at .*calls=56.* after 40 steps, another at .*calls=55"):
        begin(1, 2)


class RestoredStage:
    """A stage that any state fits."""

    def restore(self, state: StageState) -> None:
        assert state is SMALL
