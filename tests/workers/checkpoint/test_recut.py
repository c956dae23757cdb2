"""Which plans a run goes on with as a run of its own."""

import json
from contextlib import closing
from pathlib import Path

import pytest

from stageline.broker.control.sqlite_store import SqliteStore
from stageline.broker.coordinator.run import run_of
from stageline.pipeline.plan import PlanRefused
from stageline.workers.checkpoint.continuable import needs_recut
from stageline.workers.checkpoint.recut import continued
from stageline.workers.checkpoint.snapshot import SnapshotDamaged
from stageline.workers.checkpoint.source import CheckpointSource, NoCheckpoint
from stageline.workers.disk.atomic_file import write_json
from stageline.workers.runs import folder as runs
from stageline.workers.runs.records import NOTE, RecutNote
from support.small_plans import plan
from support.workspace import free_port


def source(run: str = "small-1", **changes: object) -> CheckpointSource:
    return CheckpointSource(Path("runs") / run, run, plan(**changes).resolved(2))


@pytest.mark.parametrize(
    "changes",
    [
        {"model__cut": [3]},
        {"schedule__name": "gpipe"},
        {"workers": {"0": {"stages": [0, 1]}}},
        {"recovery__snapshot_every": 7},
        {"model__cut": [3], "queues__url": "tcp://127.0.0.1:0"},
    ],
)
def test_what_is_laid_out_in_another_way_is_a_run_of_its_own(changes: dict[str, object]) -> None:
    assert needs_recut(plan(**changes).resolved(2), source())


def test_a_plan_that_only_names_other_addresses_is_the_run_itself() -> None:
    assert not needs_recut(plan(queues__url="tcp://127.0.0.1:0", recovery__lease=3).resolved(2), source())


@pytest.mark.parametrize(
    ("before", "now", "named"),
    [
        ({}, {"model__cut": [3], "optimizer__lr": 0.2}, "optimizer.lr: 0.2 here, 0.1 there"),
        ({"schedule__mode": "async"}, {"schedule__mode": "async", "model__cut": [3]}, "small-1 is asynchronous"),
        (
            {"schedule__mode": "async", "schedule__name": "2bw", "schedule__microbatches": 2},
            {"schedule__mode": "async", "schedule__name": "2bw", "schedule__microbatches": 2, "model__cut": [3]},
            "microbatches in flight is for the stages that it had, so it goes on with the plan",
        ),
        ({}, {"model__cut": [3], "queues__url": "memory://"}, "from a checkpoint, and none is read with"),
        ({}, {"model__cut": [3], "recovery__restarts": 0}, "from a checkpoint, and none is read with"),
    ],
)
def test_what_would_give_other_bits_or_begin_at_no_checkpoint_is_refused(
    before: dict[str, object], now: dict[str, object], named: str
) -> None:
    with pytest.raises(PlanRefused, match=named):
        needs_recut(plan(**now).resolved(2), source(**before))


@pytest.mark.parametrize(("before", "now"), [(2, 3), (1, 2), (2, 1)])
def test_another_number_of_replicas_is_named_and_no_key_that_they_do_not_let_change(before: int, now: int) -> None:
    """It was said that cut, workers and schedule may differ, and they may not."""
    with pytest.raises(PlanRefused) as refused:
        needs_recut(plan(**replicas(now)).resolved(2), source(**replicas(before)))
    said = str(refused.value)
    assert "was begun with another plan: stage.1.replicas: " in said
    assert said.endswith(
        "Resume it with the plan that it began with only, since a stage has replicas, or leave out --resume to begin "
        "another run [SL101]"
    )


def replicas(count: int) -> dict[str, object]:
    return {"stage": {"1": {"replicas": count}}, "schedule__microbatches": 4}


def ended_run(folder: Path, run: str, complete: int | None) -> CheckpointSource:
    """A run without snapshots; its records, unless None, have `complete` as its newest complete checkpoint."""
    found = CheckpointSource(folder / run, run, plan(run__dir=str(folder)).resolved(2))
    (folder / run).mkdir()
    (folder / run / runs.PLAN).write_text(json.dumps(found.plan.as_mapping()))
    if complete is not None:
        with closing(SqliteStore(folder / run / runs.STORE)) as store:
            store.put("registry", {"checkpoints": {"complete": complete, "newer": [[], []]}})
    return found


def test_a_run_without_a_checkpoint_begins_again_in_another_layout_as_one_run(tmp_path: Path) -> None:
    ended, other = ended_run(tmp_path, "small-1", 0), plan(run__dir=str(tmp_path), model__cut=[3]).resolved(2)
    said: list[str] = []
    made = {continued(other, ended, (), said.append) for _ in range(2)}
    assert {path.name for path in tmp_path.iterdir()} == {"small-1", *made}
    (run,) = made
    assert run.startswith("small-1-at0-")
    (told,) = said
    assert "small-1 " in told
    assert run in told


def test_a_snapshot_of_one_stage_alone_makes_no_checkpoint(tmp_path: Path) -> None:
    """All processes were killed after the first stage had written one. Without records it is not known that they were:
    the other stage's may be on another machine."""
    ended, other = ended_run(tmp_path, "small-1", 0), plan(run__dir=str(tmp_path), model__cut=[3]).resolved(2)
    (ended.folder / "checkpoints/stage-0/step-0000000010").mkdir(parents=True)
    assert continued(other, ended, (), len).startswith("small-1-at0-")
    (ended.folder / runs.STORE).unlink()
    with pytest.raises(SnapshotDamaged, match=r"manifest\.json"):
        continued(other, ended, (), len)


@pytest.mark.parametrize(("run", "complete"), [("small-1", 4), ("small-1-at4-5e1d03", 0)])
def test_a_run_whose_snapshots_are_gone_does_not_begin_again(run: str, complete: int, tmp_path: Path) -> None:
    """Its steps would be lost without a word: the files may be on another machine."""
    ended, other = ended_run(tmp_path, run, complete), plan(run__dir=str(tmp_path), model__cut=[3]).resolved(2)
    with pytest.raises(NoCheckpoint, match="holds no snapshot"):
        continued(other, ended, (), pytest.fail)


def test_without_records_it_is_not_known_that_a_run_had_no_checkpoint(tmp_path: Path) -> None:
    """Its snapshots may be on other machines. A broker that was started again without records has only that to tell."""
    ended, other = ended_run(tmp_path, "small-1", None), plan(run__dir=str(tmp_path), model__cut=[3]).resolved(2)
    with pytest.raises(NoCheckpoint, match="holds no snapshot"):
        continued(other, ended, (), pytest.fail)
    with closing(SqliteStore(ended.folder / runs.STORE)) as store:
        run_of(store, ended.plan.digest(), "small-1", b"", resume=True)
    with pytest.raises(NoCheckpoint, match="holds no snapshot"):
        continued(other, ended, (), pytest.fail)


def test_the_store_that_the_run_was_recorded_in_decides_whether_it_had_a_checkpoint(tmp_path: Path) -> None:
    """The empty store of the new plan was asked."""
    ended, nowhere = ended_run(tmp_path, "small-1", 0), f"redis://127.0.0.1:{free_port()}"
    moved = plan(run__dir=str(tmp_path), model__cut=[3], broker__store=nowhere).resolved(2)
    assert continued(moved, ended, (), len).startswith("small-1-at0-")


def test_a_run_does_not_go_back_to_a_best_checkpoint_from_before_it_began(tmp_path: Path) -> None:
    """It began at step 94 of another run, whose best checkpoint, of step 10, moved along."""
    run = "small-1-at94-5e1d03"
    ended, other = ended_run(tmp_path, run, 94), plan(run__dir=str(tmp_path), model__cut=[3]).resolved(2)
    write_json(ended.folder / NOTE, RecutNote("small-1", 94))
    paths = {step: [ended.folder / f"checkpoints/stage-{of}/step-{step:010d}" for of in (0, 1)] for step in (10, 94)}
    for path in [*paths[10], *paths[94]]:
        path.mkdir(parents=True)
    said: list[str] = []
    with pytest.raises(SnapshotDamaged) as refused:
        continued(other, ended, (), said.append)
    assert f"stageline checkpoint split {tmp_path / 'small-1'} --step 94 --write" in str(refused.value)
    assert [str(paths[94][0]) in each for each in said] == [True]  # step 10 was not tried
    paths[94][1].rmdir()
    with pytest.raises(SnapshotDamaged, match="manifest"):
        continued(other, ended, (), said.append)
    assert not any("step-0000000010" in each for each in said)
