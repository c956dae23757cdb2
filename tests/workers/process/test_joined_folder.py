"""A worker that has joined by an address changes the folder of its own run alone."""

from pathlib import Path

import pytest
import torch

from stageline.pipeline.plan import Plan, read_plan
from stageline.pipeline.stage.stage_state import StageState
from stageline.workers.checkpoint.directory import FOLDER, SnapshotDirectory
from stageline.workers.checkpoint.snapshot import Origin, Snapshot
from stageline.workers.disk.atomic_file import write_json
from stageline.workers.process.join import NOTE, note_own, why_not_own
from stageline.workers.runs import folder as runs

RUN = "digits-1"


def plan(tmp_path: Path, *sets: str) -> Plan:
    every = ["run.steps=20", f"run.dir={tmp_path}", "run.seed=1", *sets]
    return read_plan("examples/mlp", sets=every, environment={}).resolved(2)


def write_snapshot(plan: Plan, run: str, written_for: str) -> None:
    checkpoints = SnapshotDirectory(runs.folder(plan, run) / FOLDER, Origin(written_for, plan.digest()))
    checkpoints.write(Snapshot(0, 20, 1, StageState({"0.weight": torch.ones(3)})))


def test_a_new_folder_is_noted_and_is_the_same_runs_from_then_on(tmp_path: Path) -> None:
    mine = plan(tmp_path)
    assert why_not_own(mine, RUN) is None
    assert not (tmp_path / RUN).exists()
    note_own(mine, RUN)
    write_snapshot(mine, RUN, RUN)
    assert why_not_own(mine, RUN) is None
    assert why_not_own(plan(tmp_path, "recovery.lease=3", "run.name=other"), RUN) is None  # machines may differ in it
    assert not runs.is_run(tmp_path / RUN)


def test_where_the_run_was_begun_its_plan_is_compared_and_nothing_noted(tmp_path: Path) -> None:
    mine = plan(tmp_path)
    write_json(tmp_path / RUN / runs.PLAN, mine.as_mapping())
    assert why_not_own(mine, RUN) is None
    note_own(mine, RUN)
    assert not (tmp_path / RUN / NOTE).exists()


@pytest.mark.parametrize("file", [runs.PLAN, NOTE])
def test_the_folder_of_a_run_with_another_plan_is_refused(tmp_path: Path, file: str) -> None:
    write_json(tmp_path / RUN / file, plan(tmp_path, "run.seed=5").as_mapping())
    said = why_not_own(plan(tmp_path), RUN) or ""
    assert f"the folder {tmp_path / RUN} is not this run's: it was begun with another plan: run.seed: 1 here, 5" in said
    (tmp_path / RUN / file).write_text("{")
    assert f"its {file} cannot be read" in (why_not_own(plan(tmp_path), RUN) or "")


def test_a_folder_with_another_runs_snapshots_or_with_unknown_files_is_refused(tmp_path: Path) -> None:
    mine, other = plan(tmp_path), plan(tmp_path, "run.seed=5")
    write_snapshot(other, RUN, RUN)
    assert "it has neither plan.json nor joined.json" in (why_not_own(mine, RUN) or "")
    write_json(tmp_path / RUN / NOTE, mine.as_mapping())
    assert f"step-0000000020 is of run {RUN}, of a plan with the digest {other.digest()[:12]}" in (
        why_not_own(mine, RUN) or ""
    )
    (tmp_path / "a-file").touch()
    assert "it cannot be read" in (why_not_own(mine, "a-file") or "")
