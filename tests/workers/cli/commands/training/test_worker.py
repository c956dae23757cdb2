"""`stageline worker`: a plan that cannot work, and a spare that is not needed."""

from support.workspace import free_port


def test_a_worker_reports_by_itself_what_is_wrong_with_its_plan(workspace):
    ended = workspace.command("worker", ".", "--set", "model.cut=[3]", "--broker", f"tcp://127.0.0.1:{free_port()}")
    assert ended.returncode == 78
    assert "model.cut = [3]" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_without_restarts_a_spare_is_refused(workspace, capsys):
    for arguments in (("train", ".", "--spares", "1"), ("worker", ".", "--spare")):
        assert workspace.here(*arguments, "--set", "recovery.restarts=0") == 2
        assert "add --set recovery.restarts=5" in capsys.readouterr().err
