"""`stageline status`: of a run that is over."""

import json


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
