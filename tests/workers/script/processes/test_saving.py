"""Files that a script's failed call to save leaves."""

from collections.abc import Callable
from pathlib import Path

import pytest

from stageline.pipeline.plan import Plan
from stageline.pipeline.plan.reader import from_mapping
from stageline.workers.checkpoint.saved import NotSaved
from stageline.workers.disk.atomic_file import write_json
from stageline.workers.errors import RunFailed
from stageline.workers.runs.folder import PLAN, RESULT, NoSuchRun
from stageline.workers.script.calls.calls import Replies
from stageline.workers.script.processes.saving import run_to_resume, save_checkpoint


def plan(folder: str = "runs") -> Plan:
    return from_mapping(
        {
            "run": {"dir": folder},
            "model": {"factory": "script:model", "loss": "script:loss", "stages": 2},
            "data": {"source": "script:batches", "batch_size": 1},
            "optimizer": {"factory": "script:optimizer"},
        }
    ).resolved(2)


def one_worker_fails(draft: str) -> Replies:
    (Path(draft) / "checkpoints").mkdir()
    (Path(draft) / "stage-1.lacks").write_text("stage 1 could not write its snapshot: No space left on device")
    return {0: None, 1: None}


def run_fails(draft: str) -> Replies:
    raise RunFailed("a worker was lost for good", 1, Path("runs/line-1"))


@pytest.mark.parametrize(
    ("call", "step", "error", "said"),
    [
        (one_worker_fails, 7, NotSaved, "saved in .*mine: stage 1 could not write its snapshot: No space left"),
        (run_fails, 7, RunFailed, "lost for good"),
        (one_worker_fails, 0, NotSaved, "no step was trained yet"),
    ],
)
def test_nothing_is_left_of_what_was_not_saved(
    call: Callable[[str], Replies], step: int, error: type[Exception], said: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=said):
        save_checkpoint(tmp_path / "mine", plan(), "line-1", lambda: step, call)
    assert list(tmp_path.iterdir()) == []


def test_a_run_that_cannot_be_resumed_is_told_in_the_scripts_words(tmp_path: Path) -> None:
    """They were those of `stageline train --resume`."""
    runs = tmp_path / "runs"
    here = plan(str(runs))
    with pytest.raises(NoSuchRun, match=r"there is no run of that name in folder = .*Line\(\.\.\.\) begins a run"):
        run_to_resume(here, runs / "line-1", list)
    (runs / "line-1").mkdir(parents=True)
    write_json(runs / "line-1" / PLAN, here.as_mapping())
    assert run_to_resume(here, runs / "line-1", list) == "line-1"
    (runs / "line-1" / RESULT).write_text("{}")
    no_checkpoint = (
        r"has finished, and has no checkpoint .* load_weights.* has its weights. Line\(\.\.\.\) begins another"
    )
    with pytest.raises(NoSuchRun, match=no_checkpoint):
        run_to_resume(here, runs / "line-1", list)


@pytest.mark.parametrize("resume", ["elsewhere/line-1", ".", ""])
def test_only_a_run_of_the_lines_own_folder_is_resumed(
    resume: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another folder's run of the same name was, and of no name the newest."""
    monkeypatch.chdir(tmp_path)
    for parent in ("runs", "elsewhere"):
        (tmp_path / parent / "line-1").mkdir(parents=True)
        write_json(tmp_path / parent / "line-1" / PLAN, plan().as_mapping())
    assert run_to_resume(plan(), Path("line-1"), list) == "line-1"
    with pytest.raises(NoSuchRun, match='Pass folder="elsewhere"' if resume[1:] else "no run of that name"):
        run_to_resume(plan(), Path(resume), list)
