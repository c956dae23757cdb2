"""A line that is left open says so."""

from pathlib import Path

import pytest

from stageline.workers.runtime.progress import Progress
from stageline.workers.script.unclosed import watch_for_close
from support.paths import TESTS
from support.workspace import Workspace


class LeftRun:
    """Stands for a run: what counts is that it is gone."""


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
    assert "after 20 steps is saved, and Line(the same arguments, resume='runs/line-1') goes on there" in told


@pytest.mark.slow
def test_a_script_that_ends_without_closing_its_line_is_told_at_its_end(workspace: Workspace) -> None:
    script = workspace.start("script", str(TESTS / "support" / "script" / "unclosed.py"))
    said, errors = script.communicate()
    assert script.returncode == 0, errors
    assert "was not closed" in errors.splitlines()[-1]
    assert float(said) > 0
