"""Which checkpoint of a run is its best, as far as the files in its folder tell."""

from pathlib import Path

import pytest

from stageline.workers.checkpoint.saved import SAVED, SavedRun
from stageline.workers.checkpoint.source import CheckpointSource, NoCheckpoint, note_best, source_in
from stageline.workers.disk.atomic_file import persist_json
from stageline.workers.runs.folder import PLAN, RESULT, Result
from support.small_plans import plan

KEEPS = {"evaluation": {"every": 3, "keep_best": True}}


def source(folder: Path, changes: dict[str, object]) -> CheckpointSource:
    return CheckpointSource(folder, "small-1", plan(**changes).resolved(2))


def finish(folder: Path, best: dict[str, object] | None) -> None:
    sums = {"losses": {}, "metrics": {}, "weights_sha256": "", "seconds": 1.0}
    persist_json(folder / RESULT, Result(run="small-1", steps=6, microbatches=3, loss=0.5, best=best, **sums))


def test_a_run_that_does_not_compare_rounds_has_no_best(tmp_path: Path) -> None:
    finish(tmp_path, {"step": 3})
    found = source(tmp_path, {})
    assert (found.best, found.best_before(6)) == (None, None)
    with pytest.raises(NoCheckpoint, match=r"evaluation\.keep_best = true"):
        found.best_checkpoint()


@pytest.mark.parametrize(("best", "step"), [({"step": 3}, 3), (None, None)])
def test_the_best_of_a_finished_run_is_that_of_its_result(
    best: dict[str, object] | None, step: int | None, tmp_path: Path
) -> None:
    finish(tmp_path, best)
    assert source(tmp_path, KEEPS).best == step


def test_the_best_of_a_scripts_run_is_where_the_note_in_its_folder_says(tmp_path: Path) -> None:
    run, kept = tmp_path / "runs" / "small-1", tmp_path / "best"
    for folder in (run, kept):
        persist_json(folder / PLAN, plan().resolved(2).as_mapping())
    persist_json(kept / SAVED, SavedRun("small-1", 4, 2))
    note_best(run, kept)
    found, step = source_in(run).best_checkpoint()
    assert (found.folder.resolve(), step) == (kept.resolve(), 4)
    persist_json(kept / SAVED, SavedRun("small-2", 6, 2))
    with pytest.raises(NoCheckpoint, match="that of run small-2 is there"):
        source_in(run).best_checkpoint()
    (kept / SAVED).unlink()
    with pytest.raises(NoCheckpoint, match=r"was kept at .*/best, and it is not there"):
        source_in(run).best_checkpoint()


def test_a_run_of_which_no_checkpoint_is_here_has_no_best_yet(tmp_path: Path) -> None:
    found = source(tmp_path, KEEPS)
    assert found.best is None
    with pytest.raises(NoCheckpoint, match="no evaluation"):
        found.best_checkpoint()
