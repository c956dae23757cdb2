"""`stageline metrics`: the lines of a run as a table, JSON, CSV and event files."""

import csv
import json
import os
import signal
import socket
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from stageline.pipeline.errors import ExitCode
from stageline.workers.cli.commands import metrics
from stageline.workers.cli.commands.metrics import ROWS, every_for
from stageline.workers.runs.metrics import METRICS, StepMetrics, encoded, evaluation_line
from support.answers import conforming
from support.trackers import Mlflow, Wandb, mlflow_modules
from support.workspace import Workspace, until


@pytest.fixture
def folder(workspace: Workspace) -> Path:
    """Of a run that is over, with an evaluation."""
    folder = workspace.folder / "runs" / "small-1"
    folder.mkdir(parents=True)
    (folder / "plan.json").write_text("{}")
    (folder / "result.json").write_text("{}")
    steps = [
        StepMetrics(
            step=step, loss=1 / (step + 1), gradient_norm=0.5, learning_rates=(0.1, 0.01), rows=6, time=1e9 + step
        )
        for step in range(100)
    ]
    lines = [*steps[:50], evaluation_line(50, {"loss": 0.25, "accuracy": 0.75}, 1e9, None), *steps[50:]]
    (folder / METRICS).write_bytes(b"".join(map(encoded, lines)))
    return folder


def test_a_long_run_is_shown_in_about_thirty_rows(workspace: Workspace, folder: Path, capsys: Any) -> None:
    assert workspace.here("metrics") == 0
    title, columns, *rows = capsys.readouterr().out.splitlines()
    assert title == "metrics of runs/small-1: 100 steps, of which 5 make a row; --every 1 shows all"
    assert columns.split()[:3] == ["step", "loss", "gradient"]
    assert [row.split()[0] for row in rows] == [str(step) for step in [*range(0, 50, 5), 50, *range(50, 100, 5)]]
    assert rows[1].split()[:6] == ["5", "0.166667", "0.5", "0.1", "0.01", "6"]
    assert rows[10].endswith("loss 0.25, accuracy 0.75")


@pytest.mark.parametrize(("steps", "every"), [(0, 1), (30, 1), (31, 2), (61, 5), (300, 10), (301, 20), (10**6, 50_000)])
def test_a_table_takes_a_round_number_of_steps_to_a_row(steps: int, every: int) -> None:
    assert every_for(steps) == every
    assert steps / every <= ROWS


def test_json_has_the_lines_as_they_are_in_the_file(workspace: Workspace, folder: Path, capsys: Any) -> None:
    assert workspace.here("metrics", "runs/small-1", "--json", "--every", "40") == 0
    found = conforming(capsys.readouterr().out)
    assert (found["schema"], found["run"]) == ("metrics/1", "small-1")
    every = [json.loads(line) for line in (folder / METRICS).read_text().splitlines()]
    assert found["lines"] == [line for line in every if line["kind"] == "evaluation" or line["step"] % 40 == 0]


def test_csv_has_a_column_for_each_learning_rate_and_each_metric(
    workspace: Workspace, folder: Path, capsys: Any
) -> None:
    assert workspace.here("metrics", "--csv", "--every", "50") == 0
    first, evaluation, last = csv.DictReader(capsys.readouterr().out.splitlines())
    assert first == {
        "kind": "step",
        "step": "0",
        "loss": "1.0",
        "gradient_norm": "0.5",
        "rows": "6",
        "time": "1000000000.0",
        "learning_rate_0": "0.1",
        "learning_rate_1": "0.01",
        "accuracy": "",
        "fit": "",
    }
    assert (evaluation["kind"], evaluation["step"], evaluation["accuracy"]) == ("evaluation", "50", "0.75")
    assert last["step"] == "50"


def test_steps_that_are_not_there_are_told(workspace: Workspace, folder: Path, capsys: Any) -> None:
    (folder / METRICS).write_bytes(encoded(StepMetrics(step=20, loss=1.0, time=1.0)))
    assert workspace.here("metrics", "--json") == 0
    assert "warning: steps 0 to 19 are not in runs/small-1/metrics.jsonl" in capsys.readouterr().err


def test_what_cannot_be_shown_is_named(workspace: Workspace, folder: Path, capsys: Any) -> None:
    assert workspace.here("metrics", "--csv", "--json") == 2
    assert "of --csv and --json take one" in capsys.readouterr().err
    (folder / METRICS).unlink()
    assert workspace.here("metrics", "runs/small-1") == 2
    assert "runs/small-1 has no metrics.jsonl: the worker of the last stage writes it" in capsys.readouterr().err


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_event_files_have_all_that_was_measured(workspace: Workspace, folder: Path, capsys: Any) -> None:
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    for _ in range(2):  # the second time in place of the first
        assert workspace.here("metrics", "--tensorboard", "events") == 0
    assert "tensorboard --logdir events" in capsys.readouterr().err
    events = reader.EventAccumulator(str(workspace.folder / "events"), size_guidance={"scalars": 0})
    events.Reload()
    found = {tag: [each.step for each in events.Scalars(tag)] for tag in events.Tags()["scalars"]}
    names = ("loss", "gradient_norm", "learning_rate/0", "learning_rate/1")
    assert found == {
        **{f"train/{name}": list(range(100)) for name in names},
        **{f"evaluation/{name}": [50] for name in ("loss", "accuracy")},
    }


def test_without_the_package_the_command_to_install_it_is_named(
    workspace: Workspace, folder: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    assert workspace.here("metrics", "--tensorboard", "events") == 2
    assert 'pip install "stageline[tensorboard]"' in capsys.readouterr().err


def test_other_programs_get_all_that_was_measured(
    workspace: Workspace, folder: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    wandb, server = Wandb(), Mlflow()
    for module in (wandb, *mlflow_modules(server)):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    for _ in range(2):
        assert workspace.here("metrics", "--wandb", "p", "--mlflow", "e", "--every", "10") == 0
    ((run),) = server.runs.values()
    steps = list(range(0, 100, 10))
    assert [step for key, _, _, step in run["metrics"] if key == "train/loss"] == steps
    assert [step for key, _, _, step in run["metrics"] if key == "evaluation/accuracy"] == [50]
    assert [each["step"] for each in wandb.logged if "train/loss" in each] == 2 * steps
    assert (wandb.begun[0]["project"], wandb.begun[0]["id"], wandb.finished) == ("p", "small-1", 2)
    assert workspace.here("metrics", "--wandb", "forbidden") == 1
    assert "permission denied" in capsys.readouterr().err
    (folder / METRICS).unlink()
    assert workspace.here("metrics", "--wandb", "q") == 2
    assert [each["project"] for each in wandb.begun] == ["p", "p"]


OWNER = {"pid": 1, "host": "", "started": 1.0, "began": 1.0, "command": "train", "name": "small"}
WHOLE = {
    "run": "small-1", "steps": 100, "microbatches": 1, "loss": 0.5, "losses": {}, "metrics": {}, "weights_sha256": "",
    "seconds": 1.0,
}  # fmt: skip


@pytest.mark.parametrize(
    ("owner", "result", "state", "code"),
    [
        (None, WHOLE, "FINISHED", 0),
        ({"ended": "a worker was lost", "code": int(ExitCode.FAILED)}, None, "FAILED", 1),
        ({"ended": "interrupted", "code": int(ExitCode.INTERRUPTED)}, None, "KILLED", 255),
        ({}, None, "KILLED", 255),
        (None, None, "RUNNING", 255),  # another machine has the records
    ],
)
def test_a_run_is_left_at_trackers_as_it_has_ended(
    workspace: Workspace, folder: Path, monkeypatch: pytest.MonkeyPatch, owner: Any, result: Any, state: str, code: int
) -> None:
    wandb, server = Wandb(), Mlflow()
    for module in (wandb, *mlflow_modules(server)):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    (folder / "result.json").unlink()
    if result is not None:
        (folder / "result.json").write_text(json.dumps(result))
    if owner is not None:
        gone = {**OWNER, "host": socket.gethostname(), "pid": 2**22 + 1, **owner}  # no process has this number
        (folder / "process.json").write_text(json.dumps(gone))
    assert workspace.here("metrics", "--wandb", "p", "--mlflow", "e", "--every", "50") == 0
    assert [run["status"] for run in server.runs.values()] == [state]
    assert wandb.codes == [code]


def test_who_stops_to_follow_a_run_does_not_end_it_at_trackers(
    workspace: Workspace, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = Mlflow()
    for module in mlflow_modules(server):
        monkeypatch.setitem(sys.modules, module.__name__, module)

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(metrics, "_follow", stop)
    with suppress(KeyboardInterrupt):
        workspace.here("metrics", "--follow", "--mlflow", "e")
    assert [run["status"] for run in server.runs.values()] == ["RUNNING"]


@pytest.mark.slow
def test_a_run_is_followed_to_its_end(workspace: Workspace) -> None:
    sets = ("--set", "run.steps=200", "--set", "queues.url=memory://")
    train = workspace.start("train", ".", *sets)
    until(train.stderr, "running")
    followed = workspace.start("metrics", "--follow", "--every", "20")
    until(followed.stdout, "gradient norm")
    train.communicate()
    said, errors = followed.communicate()
    assert followed.returncode == 0, errors
    assert [line.split()[0] for line in said.splitlines()] == [
        str(step) for step in range(0, 201, 20)
    ]  # the last: rows held out


def test_a_run_that_was_killed_is_followed_to_what_there_is(workspace: Workspace, folder: Path) -> None:
    (folder / "result.json").unlink()
    train = workspace.start("train", ".", "--set", "run.steps=100000", "--set", "queues.url=memory://")
    until(train.stderr, "running")
    followed = workspace.start("metrics", "--follow")
    until(followed.stdout, "gradient norm")
    os.kill(train.pid, signal.SIGKILL)
    train.communicate()
    assert followed.wait() == 0
