"""A line that is left open says so."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from stageline.workers.runtime.progress import Progress
from stageline.workers.script.calls.news import watch_for_close
from support.paths import TESTS
from support.workspace import Workspace


class LeftRun:
    """Stands for a run: what counts is that it is gone."""

    def abort(self, reason: str) -> None:
        raise AssertionError(reason)


def test_a_run_that_is_forgotten_without_being_closed_is_told_with_its_newest_checkpoint(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for closed in (True, False):
        run = LeftRun()
        watch = watch_for_close(run, Path("runs/line-1"), Progress(complete=20))
        if closed:
            watch.detach()
        del run
        told = capsys.readouterr().err
        assert bool(told) is not closed
    assert "the line of runs/line-1 was not closed" in told
    assert "after 20 steps is saved, and Line.resume('runs/line-1', ...) goes on there" in told


@pytest.mark.slow
def test_a_script_that_ends_without_closing_its_line_is_told_at_its_end_and_its_last_step_is_saved(
    workspace: Workspace,
) -> None:
    """In an interpreter of its own: the forks of the fork server end without one's end."""
    script = TESTS / "support" / "script" / "unclosed.py"
    environment = {**os.environ, "TMPDIR": str(workspace.temporary)}
    ended = subprocess.run(
        [sys.executable, script], cwd=workspace.folder, env=environment, capture_output=True, text=True, check=True
    )
    assert "was not closed" in ended.stderr.splitlines()[-1]
    assert "It begins at step 1" in ended.stderr.splitlines()[-2]
    assert float(ended.stdout) > 0
    assert not workspace.processes()
