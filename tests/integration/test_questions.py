"""Questions about a run: to its broker while it is there, and to the run's folder when it has left."""

import json
import signal
from functools import partial

import pytest

from stageline.broker.control.records import EvaluationRecord
from stageline.workers.cli.app import run
from stageline.workers.control.client import Client
from stageline.workers.runs.folder import read_control_secret
from support.conversation import Conversation, name, report
from support.workspace import free_port, until


def test_a_waiting_run_names_the_missing_workers_and_a_finished_one_shows_each_microbatchs_history(workspace, capsys):
    broker = workspace.start("broker", ".", "--bind", f"tcp://127.0.0.1:{free_port()}")
    url = until(broker.stderr, "broker at").split("broker at ")[1].split(",")[0]
    assert workspace.here("why", "--broker", url) == 0
    said = capsys.readouterr().out
    assert "did not join yet" in said
    assert "what to do: " in said
    assert workspace.here("why", "--broker", url, "--stage", "1", "--json") == 0
    assert json.loads(capsys.readouterr().out)["schema"] == "why/1"
    assert workspace.here("why", "--broker", url, "--stage", "7") == 2
    assert "there is no stage 7: the plan has stages 0 to 1" in capsys.readouterr().err

    workers = [workspace.start("worker", ".", "--broker", url) for _ in range(2)]
    for worker in workers:
        _, errors = worker.communicate()
        assert worker.returncode == 0, errors
    assert workspace.here("story", "4/1", "--broker", url) == 0
    title, _, *stages = capsys.readouterr().out.splitlines()
    assert title.startswith("microbatch 1 of step 4 of run small-")
    assert [[f"{stage}{kind}" in row for kind in ("F1", "B1", "U")] for stage, row in enumerate(stages)] == [
        [True, True, True],
        [True, True, True],
    ]
    assert workspace.here("story", "4/1", "--broker", url, "--json") == 0
    assert json.loads(capsys.readouterr().out)["schema"] == "story/1"
    assert workspace.here("story", "4/9", "--broker", url) == 2
    assert "there is no microbatch 9" in capsys.readouterr().err
    with Client(url, partial(read_control_secret, workspace.runs()[-1])) as client:
        client.dismiss()
    assert broker.wait() == 0


HEAVY = {"torch", "numpy", "structlog", "rich", "asyncio", "textual", "hypothesis", "cryptography"}


def test_a_command_that_only_asks_imports_nothing_that_takes_long(workspace):
    def imported(*words: str) -> set[str]:
        asked = workspace.command(*words, cold=True, PYTHONPROFILEIMPORTTIME="1")
        assert asked.returncode == 0, asked.stderr
        lines = (line for line in asked.stderr.splitlines() if line.startswith("import time:"))
        return {line.rpartition("|")[2].strip().partition(".")[0] for line in lines}

    broker = workspace.start("broker", ".", "--bind", f"tcp://127.0.0.1:{free_port()}", "--run", "small-1")
    url = until(broker.stderr, "broker at").split("broker at ")[1].split(",")[0]
    live = [imported(*words, "--broker", url) for words in (("why",), ("status",), ("queue", "ls"))]
    broker.send_signal(signal.SIGINT)
    broker.wait()
    over = imported("why", "runs/small-1")
    assert all("zmq" in each for each in live)
    assert "pydantic" in over
    assert not HEAVY & set().union(over, *live)


def test_a_finished_runs_folder_shows_its_result_when_no_broker_is_left(workspace, capsys):
    assert workspace.here("train", ".", "--json", "--set", "queues.url=memory://") == 0
    trained = json.loads(capsys.readouterr().out)
    (folder,) = workspace.runs()
    for file in (None, folder / "broker.sqlite"):
        if file is not None:
            file.unlink()  # the result is enough
        assert workspace.here("status", str(folder), "--json") == 0
        told = json.loads(capsys.readouterr().out)
        assert told["result"] == trained
        assert (told["last_loss"], told["losses"]) == ({"step": 5, "loss": trained["loss"]}, trained["losses"])
        assert workspace.here("status", str(folder)) == 0
        assert f"weights_sha256  {trained['weights_sha256']}" in capsys.readouterr().out


def test_the_status_of_a_run_shows_a_metric_that_is_no_finite_number(monkeypatch, capsys):
    talk = Conversation()
    for index in range(2):
        talk.join(index)
    talk.send(name(1), report(1, evaluations=[EvaluationRecord(6, 8, 0.25, {"accuracy": 0.5, "lost": float("nan")})]))
    monkeypatch.setattr("stageline.workers.cli.options.Client.ask", lambda *query, **of: talk.status())
    assert run(["status", "--broker", "ipc://asked"]) == 0
    assert capsys.readouterr().out.splitlines()[2:4] == ["  accuracy 0.5", "  lost nan"]


@pytest.mark.parametrize("killed", [False, True])
def test_a_run_without_result_and_broker_shows_how_to_go_on(killed, workspace, capsys):
    broker = workspace.start("broker", ".", "--bind", f"tcp://127.0.0.1:{free_port()}", "--run", "small-1")
    until(broker.stderr, "broker at")
    broker.send_signal(signal.SIGKILL if killed else signal.SIGINT)
    broker.wait()
    assert workspace.here("why", "runs/small-1", "--json") == 0
    told = json.loads(capsys.readouterr().out)
    text = "the run's broker was killed or lost its machine before it began" if killed else "the broker was interrupted"
    assert told["text"].startswith(text)
    assert (told["state"], told["source"]) == ("killed" if killed else "stopped", "records")
    command = "stageline broker ." if killed else "stageline broker . --run small-1 --resume"
    assert command in told["action"]


def test_a_broker_of_another_plan_leaves_the_plan_that_a_run_was_begun_with(workspace):
    first = workspace.start("broker", ".", "--bind", f"tcp://127.0.0.1:{free_port()}", "--run", "small-1")
    until(first.stderr, "broker at")
    first.send_signal(signal.SIGINT)
    first.communicate()
    before = (workspace.folder / "runs/small-1/plan.json").read_text()
    other = workspace.command(
        "broker", ".", "--bind", f"tcp://127.0.0.1:{free_port()}", "--run", "small-1", "--resume", "--set", "run.seed=5"
    )
    assert other.returncode == 1
    assert "of another plan" in other.stderr
    for file in (workspace.folder / "runs/small-1").glob("broker.sqlite*"):
        file.unlink()
    assert workspace.here("broker", ".", "--run", "small-1", "--resume", "--set", "run.seed=5") == 78
    assert (workspace.folder / "runs/small-1/plan.json").read_text() == before
