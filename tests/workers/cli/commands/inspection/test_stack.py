"""`stack`: what the workers of a run execute, also of one that hangs in user code."""

import json
import signal
from contextlib import nullcontext

import jsonschema
import pytest

from stageline.workers.cli.commands.stack import stack
from stageline.workers.cli.output import CommandFailed
from stageline.workers.cli.schemas import schema_of
from support.conversation import Conversation
from support.workspace import Workspace, until, wait_for

HANGS = """
import time
from pathlib import Path
from torch import nn


class Hangs(nn.Module):
    def forward(self, x):
        while Path(__file__).with_name("hang").exists():
            time.sleep(0.01)
        return x


def build():
    return nn.Sequential(nn.Linear(4, 8), Hangs(), nn.Linear(8, 2))
"""
OF_A_HANG = ("--set", "model.factory=hangs.py:build", "--set", "model.cut=[1]", "--set", "run.steps=200000")
READ = {"worker": 0, "name": "worker-0", "missing": "", "threads": []}
PATIENT = ("--set", "recovery.lease=600")  # a worker that hangs is not declared lost


@pytest.mark.slow
def test_the_line_of_user_code_that_hangs_is_shown_and_the_run_goes_on(workspace: Workspace, capsys):
    (workspace.folder / "hangs.py").write_text(HANGS)
    train = workspace.start("train", ".", *OF_A_HANG, *PATIENT)
    answers = []
    until(train.stderr, "running")
    (workspace.folder / "hang").touch()

    def hangs() -> bool:
        capsys.readouterr()
        if workspace.here("stack", "--json") != 0:
            return False
        answers.append(json.loads(capsys.readouterr().out))
        return "time.sleep(0.01)" in json.dumps(answers[-1])

    wait_for(hangs)
    jsonschema.validate(answers[-1], schema_of("stack/1"))
    (stack,) = {each["worker"]: each["threads"] for each in answers[-1]["workers"]}[1]
    assert stack["frames"][-1]["function"] == "forward"
    assert stack["frames"][-1]["file"].endswith("hangs.py")
    shown = said(workspace, capsys, "stack", "1", "--all", code=0, part="hangs.py")
    assert "thread main" in shown
    said(workspace, capsys, "stack", "9", code=2, part="worker 9")
    assert workspace.here("stack", "1", "runs", "more") == 2
    assert "'more'" in capsys.readouterr().err
    (workspace.folder / "hang").unlink()
    wait_for(lambda: not hangs())
    train.send_signal(signal.SIGINT)
    assert train.wait() in (75, 130)  # 130: no step could be finished in time, and nothing is saved


def said(workspace: Workspace, capsys, *words: str, code: int, part: str) -> str:
    """The output of a command that ends with `code` and prints `part`, once the broker has answered in time."""
    found: list[str] = []

    def look() -> bool:
        capsys.readouterr()
        ended = workspace.here(*words)
        found.append("".join(capsys.readouterr()))
        return ended == code and part in found[-1]

    wait_for(look)
    return found[-1]


def test_a_place_without_a_worker_is_told_as_such(capsys):
    talk = Conversation()
    talk.join(0)
    ask = {"status": lambda **of: talk.status(), "stack": lambda **of: {"workers": [READ]}}
    context = nullcontext(lambda query, **of: ask[query](**of))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("stageline.workers.cli.options.asking", lambda where, broker: context)
        stack.main(["--json"], standalone_mode=False)
        facts = json.loads(capsys.readouterr().out)
        stack.main([], standalone_mode=False)
        with pytest.raises(CommandFailed, match="worker 1 has not joined"):
            stack.main(["1"], standalone_mode=False)
    jsonschema.validate(facts, schema_of("stack/1"))
    assert [(each["worker"], each["missing"]) for each in facts["workers"]] == [(0, ""), (1, "is not there")]
    assert "worker 1: is not there" in capsys.readouterr().out


@pytest.mark.parametrize("words", [(), ("0",)])
def test_a_run_that_is_over_has_no_stacks_and_the_message_says_where_to_look(workspace: Workspace, capsys, words):
    assert workspace.here("train", ".", "--set", "queues.url=memory://") == 0
    capsys.readouterr()
    assert workspace.here("stack", *words) != 0
    assert "stageline status" in capsys.readouterr().err
