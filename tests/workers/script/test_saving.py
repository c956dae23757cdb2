"""What a script's call to save leaves behind when it fails."""

from collections.abc import Callable
from pathlib import Path

import pytest

from stageline.pipeline.plan import Plan
from stageline.pipeline.plan.reader import from_mapping
from stageline.workers.checkpoint.saved import NotSaved
from stageline.workers.script.errors import RunFailed
from stageline.workers.script.saving import save_checkpoint
from stageline.workers.script.script_run import Replies


def plan() -> Plan:
    return from_mapping(
        {
            "model": {"factory": "script:model", "loss": "script:loss", "stages": 2},
            "data": {"source": "script:batches", "batch_size": 1},
            "optimizer": {"factory": "script:optimizer"},
        }
    ).resolved(2)


def one_worker_fails(draft: str) -> Replies:
    (Path(draft) / "checkpoints").mkdir()
    return {0: None, 1: "stage 1 could not write its snapshot: No space left on device"}


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
