"""A checkpoint of a scripted run in a folder of its own."""

from pathlib import Path

import pytest
import torch
from torch import nn

from stageline.broker.control.messages import Assigned
from stageline.pipeline.plan import Plan, PlanRefused
from stageline.pipeline.plan.reader import from_mapping
from stageline.pipeline.stage.stage import Stage
from stageline.workers.checkpoint.directory import SnapshotDirectory
from stageline.workers.checkpoint.saved import (
    NotSaved,
    SavedRun,
    begin_from_saved,
    complete_draft,
    draft_folder,
    save_stages,
)
from stageline.workers.checkpoint.snapshot import Origin, SnapshotDamaged
from stageline.workers.runtime.calls import Position
from stageline.workers.runtime.progress import Progress

ASSIGNED = Assigned("line-1", 0, 5, 0)


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def plan(seed: int = 0) -> Plan:
    return from_mapping(
        {
            "run": {"name": "line", "seed": seed, "log_every": 4},
            "model": {"factory": "script:model", "loss": "script:loss", "stages": 1},
            "data": {"source": "script:batches", "batch_size": 1},
            "optimizer": {"factory": "script:optimizer"},
        }
    ).resolved(1)


def saved(folder: str = "saved") -> Path:
    """One stage after 7 steps."""
    stage = Stage(nn.Sequential(nn.Linear(2, 2)), optimizer=torch.optim.AdamW, loss=nn.functional.mse_loss)
    progress = Progress(last=0, losses={0: 0.5, 3: 0.4, 4: 0.3}, newest=(6, 0.2))
    draft = draft_folder(Path(folder))
    save_stages(draft, plan(), ASSIGNED, {0: stage}, 7, progress)
    complete_draft(draft, Path(folder), plan(), SavedRun("line-1", 7, 1))
    return Path(folder)


def test_a_new_run_begins_from_it_with_its_steps_and_losses_and_without_calls() -> None:
    folder = saved()
    for file in folder.rglob("*.*"):
        file.chmod(0o444)  # as on a medium that is read-only
    run = begin_from_saved(plan(), folder)
    snapshot = SnapshotDirectory(Path("runs") / run / "checkpoints", Origin(run, plan().digest())).load(0, 7)
    assert snapshot.position == Position(7, 7, 0)  # its steps count as calls
    assert snapshot.losses == {0: 0.5, 4: 0.3, 6: 0.2}
    assert begin_from_saved(plan(), folder) != run
    assert all(file.stat().st_mode & 0o200 for file in (Path("runs") / run).rglob("*"))


def test_another_plan_and_a_changed_file_are_refused_before_there_is_a_run() -> None:
    folder = saved()
    with pytest.raises(PlanRefused, match=r"run\.seed"):
        begin_from_saved(plan(seed=1), folder)
    (file,) = folder.rglob("weights.safetensors")
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(SnapshotDamaged, match=r"weights\.safetensors has \d+ bytes"):
        begin_from_saved(plan(), folder)
    assert not list(Path("runs").glob("*"))


def test_what_is_there_is_not_written_into() -> None:
    Path("full").mkdir()
    Path("full/mine").write_text("")
    Path("empty").mkdir()
    for taken in ("full", "full/mine"):
        with pytest.raises(NotSaved, match="is there already, and not empty"):
            draft_folder(Path(taken))
    with pytest.raises(NotSaved, match="cannot be saved"):
        draft_folder(Path("full/mine/below"))
    assert (saved("empty") / "saved.json").exists()


def test_a_worker_that_cannot_write_says_why_and_goes_on() -> None:
    draft, progress = draft_folder(Path("saved")), Progress(last=0)
    (draft / "checkpoints").write_text("in the way")
    stage = Stage(nn.Sequential(nn.Linear(2, 2)), optimizer=torch.optim.AdamW, loss=nn.functional.mse_loss)
    save_stages(draft, plan(), ASSIGNED, {0: stage}, 7, progress)
    assert not progress.writes
    (draft / "checkpoints").unlink()
    with pytest.raises(NotSaved, match=r"saved in saved: stage 0 could not write its snapshot of step 7 to "):
        complete_draft(draft, Path("saved"), plan(), SavedRun("line-1", 7, 1))
    save_stages(draft, plan(), ASSIGNED, {0: stage}, 7, progress)  # the worker was lost, and repeats the call
    complete_draft(draft, Path("saved"), plan(), SavedRun("line-1", 7, 1))
    assert sorted(each.name for each in Path("saved").iterdir()) == ["checkpoints", "plan.json", "saved.json"]


def test_a_call_that_is_carried_out_once_more_makes_no_folder_again() -> None:
    draft = draft_folder(Path("saved"))
    draft.rmdir()  # the script has its checkpoint, or has given up
    save_stages(draft, plan(), ASSIGNED, {}, 7, Progress())
    assert not draft.exists()
    with pytest.raises(NotSaved, match="stage 0 has written none"):
        complete_draft(draft, Path("saved"), plan(), SavedRun("line-1", 7, 1))
