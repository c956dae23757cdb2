"""The commands that ask a run's broker: a run that is over, and the rows of `story`."""

import json

from stageline.workers.cli.commands.queries import _attempts

HOLDER = {"name": "worker-1", "generation": 2}


def test_without_arguments_the_newest_run_is_looked_at_even_if_it_is_over(workspace, capsys):
    assert workspace.here("train", ".", "--set", "queues.url=memory://") == 0
    weights = json.loads((workspace.runs()[0] / "result.json").read_text())["weights_sha256"]
    capsys.readouterr()
    assert workspace.here("status") == 0
    assert weights in capsys.readouterr().out
    assert workspace.here("status", "--json") == 0
    assert json.loads(capsys.readouterr().out)["schema"] == "train/1"
    for words in (("queue", "ls"), ("why",), ("story", "1/0")):
        assert workspace.here(*words) == 3
        assert f"run {workspace.runs()[0].name} has finished" in capsys.readouterr().err


def test_a_folder_that_does_not_exist_is_named_by_every_command_that_reads_one(workspace, capsys):
    place = ("--stage", "0", "--step", "0", "--microbatch", "0")
    for words in (("status",), ("queue", "ls"), ("why",), ("story", "1/0"), ("replay",)):
        assert workspace.here(*words, "runs/small-7", *(place if words == ("replay",) else ())) == 78
        assert capsys.readouterr().err.startswith("stageline: runs/small-7 does not exist: name the folder of a run")


def test_every_attempt_has_a_row_and_the_last_counts():
    found = {
        "stage": 1,
        "worker": 1,
        "attempts": [{"name": "worker-1", "generation": 1, "state": "forward", "why": "was killed by SIGKILL"}],
        "state": "done",
        "holder": HOLDER,
        "actions": [{"action": "1F6", "start": 12.5, "end": 12.75}],
    }
    lost, counted = _attempts(found, 12.0)
    assert lost == (1, 1, 1, "lost (forward)", "worker-1, generation 1", "was killed by SIGKILL")
    assert counted == (1, 1, 2, "done", "worker-1, generation 2", "1F6 500 ms, 250 ms")


def test_a_stage_that_has_not_begun_has_a_row_without_a_worker():
    found = {"stage": 0, "worker": 0, "attempts": [], "state": "waiting", "holder": None, "actions": []}
    assert list(_attempts(found, 0.0)) == [(0, 0, 1, "waiting", "-", "-")]
