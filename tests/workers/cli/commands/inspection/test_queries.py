"""The commands that ask a run's broker: a run that is over, and the rows of `story`."""

import json

import jsonschema
import pytest

from stageline.workers.cli.app import run
from stageline.workers.cli.commands.queries import show_status
from stageline.workers.cli.schemas import SCHEMAS, schema_of
from stageline.workers.cli.tables.answers import attempts
from support.conversation import Conversation, name
from support.scripted import SCRIPT, SCRIPTED, reach, script_says, scripted

HOLDER = {"name": "worker-1", "generation": 2}


def test_without_arguments_the_newest_run_is_looked_at_even_if_it_is_over(workspace, capsys):
    assert workspace.here("train", ".", "--set", "queues.url=memory://") == 0
    weights = json.loads((workspace.runs()[0] / "result.json").read_text())["weights_sha256"]
    capsys.readouterr()
    assert workspace.here("status") == 0
    assert weights in capsys.readouterr().out
    told = {}
    for words in (("status",), ("queue", "ls"), ("why",), ("story", "1/0")):
        assert workspace.here(*words, "--json") == 0
        told[words[0]] = json.loads(capsys.readouterr().out)
        if (name := told[words[0]]["schema"]) in SCHEMAS:
            jsonschema.validate(told[words[0]], schema_of(name))
        assert told[words[0]]["source"] == "records"
        assert told[words[0]]["state"] == "finished"
    assert {facts["schema"] for facts in told.values()} == {"status/1", "queues/2", "why/1", "story/1"}
    assert (told["status"]["weights_sha256"], told["status"]["finished_floor"]) == (weights, 6)
    assert told["why"]["text"] == "all steps are done"
    assert [stage["state"] for stage in told["story"]["stages"]] == ["done", "done"]
    assert workspace.here("story", "9999999/1") == 2
    assert "has 6 training steps; ask for 0 to 5" in capsys.readouterr().err


@pytest.mark.parametrize("words", [("status",), ("why",), ("queue", "ls"), ("story", "1/0")])
def test_without_a_run_or_a_plan_a_question_names_what_to_do(words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("STAGELINE_BROKER__URL", raising=False)
    monkeypatch.setattr("stageline.workers.cli.options.Client", None)  # no broker is asked
    assert run([*words, "--json"]) == 3
    printed = capsys.readouterr()
    assert "no run is in ./runs, and no plan is here: name the folder of a run" in printed.err
    assert json.loads(printed.out)["schema"] == "error/1"


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
    lost, counted = attempts(found, 12.0)
    assert lost == (1, 1, 1, "lost (forward)", "worker-1, generation 1", "was killed by SIGKILL")
    assert counted == (1, 1, 2, "done", "worker-1, generation 2", "1F6 500 ms, 250 ms")


def test_a_stage_that_has_not_begun_has_a_row_without_a_worker():
    found = {"stage": 0, "worker": 0, "attempts": [], "state": "waiting", "holder": None, "actions": []}
    assert list(attempts(found, 0.0)) == [(0, 0, 1, "waiting", "-", "-")]


def test_a_scripted_runs_status_shows_the_script_and_no_number_of_steps(capsys):
    talk = scripted()
    reach(talk, 12)
    talk.send(name(SCRIPT), script_says("its own code after call 14", calls=14))
    show_status(talk.status())
    out = capsys.readouterr().out
    assert "\n  step 12\n" in out
    assert " of ?" not in out
    assert out.splitlines()[-1].split() == [
        *("script", "-", "present", "script,", "pid", "102", "on", "desk", "0", "ms", "ago", "0", "%", "-", "14"),
        *("its", "own", "code", "after", "call", "14"),
    ]


def test_a_status_names_the_script_among_those_that_the_run_waits_for(capsys):
    talk = Conversation(terms=SCRIPTED)
    show_status(talk.status())
    assert "waits for worker 0, 1 and the script\n" in capsys.readouterr().out
    talk.join(0), talk.join(1)
    show_status(talk.status())
    out = capsys.readouterr().out
    assert "waits for the script\n" in out
    assert out.splitlines()[-1].split() == ["script", "-", "missing", *"------"]
