"""`stageline worker`: a plan that cannot work, and a spare that is not needed."""

import pytest

from support.workspace import free_port


def test_a_worker_reports_by_itself_what_is_wrong_with_its_plan(workspace):
    ended = workspace.command("worker", ".", "--set", "model.cut=[3]", "--broker", f"tcp://127.0.0.1:{free_port()}")
    assert ended.returncode == 78
    assert "model.cut = [3]" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_without_snapshots_a_spare_is_refused_with_the_key_that_is_missing(workspace, capsys):
    assert workspace.here("worker", ".", "--spare", "--set", "recovery.snapshot_every=0") == 2
    assert "add --set recovery.snapshot_every=" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (("--alive-file", "none/alive"), "none/alive"),
        (("--keep", "--alive-file", "none/alive"), "none/alive"),
        (("--alive-file", "."), "'--alive-file': ."),
        (("--hung-seconds", "30"), "--keep"),
        (("--keep", "--hung-seconds", "1"), "x>=5"),
    ],
)
def test_a_watch_that_could_see_nothing_is_refused(workspace, words, named):
    ended = workspace.command("worker", ".", *words)  # a process of its own, which would become the keeper
    assert (ended.returncode, named in ended.stderr) == (2, True), ended.stderr


def test_without_restarts_a_spare_is_refused(workspace, capsys):
    for arguments in (("train", ".", "--spares", "1"), ("worker", ".", "--spare")):
        assert workspace.here(*arguments, "--set", "recovery.restarts=0") == 2
        assert "add --set recovery.restarts=5" in capsys.readouterr().err
