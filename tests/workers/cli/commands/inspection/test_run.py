"""`stageline run ls`: one line for each run."""

import json

import jsonschema

from stageline.workers.cli.schemas import schema_of


def test_runs_are_listed_in_the_order_in_which_they_began(workspace, capsys):
    for steps in (6, 4):
        assert workspace.here("train", ".", "--set", "queues.url=memory://", "--set", f"run.steps={steps}") == 0
    capsys.readouterr()
    assert workspace.here("run", "ls", "--json") == 0
    listed = json.loads(capsys.readouterr().out)
    assert (listed["schema"], listed["folder"]) == ("run-ls/1", "runs")
    jsonschema.validate(listed, schema_of("run-ls/1"))
    assert [(row["state"], row["steps"], row["total"]) for row in listed["runs"]] == [
        ("finished", *[n] * 2) for n in (6, 4)
    ]
    results = [json.loads((workspace.folder / row["folder"] / "result.json").read_text()) for row in listed["runs"]]
    for name in ("run", "loss", "weights_sha256"):
        assert [row[name] for row in listed["runs"]] == [result[name] for result in results]
    assert workspace.here("run", "ls", "runs") == 0
    _, columns, *rows = capsys.readouterr().out.splitlines()
    assert columns.split() == ["run", "plan", "began", "state", "steps", "loss", "checkpoint", "weights", "reason"]
    assert [results[place]["weights_sha256"][:12] in row for place, row in enumerate(rows)] == [True, True]


def test_a_folder_without_runs_has_none_and_no_folder_is_an_error(workspace, capsys):
    (workspace.folder / "runs").mkdir()
    assert workspace.here("run", "ls", "--json") == 0
    assert json.loads(capsys.readouterr().out)["runs"] == []
    assert workspace.here("run", "ls", "elsewhere") == 2
    assert "there is no folder elsewhere" in capsys.readouterr().err
