"""`stageline report`: one page of a run that was trained, that has not begun, and whose broker is there."""

import json
import re
from pathlib import Path

import msgspec
import pytest

from stageline.workers.cli.options import answer_about
from stageline.workers.runs.owner import RunOwner
from support.workspace import Workspace, wait_for


def data_of(file: Path) -> dict:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', file.read_text(encoding="utf-8"))
    assert found
    return json.loads(found[1])["sections"]


def test_a_page_is_made_of_the_records_of_a_run_after_its_end(workspace: Workspace, capsys) -> None:
    sets = ("queues.url=memory://", "recovery.snapshot_every=2", "evaluation.every=3", 'run.name="tiny"')
    assert workspace.here("train", ".", *(word for each in sets for word in ("--set", each))) == 0
    (folder,) = workspace.runs()
    capsys.readouterr()
    assert workspace.here("report") == 0
    file = workspace.folder / f"{folder.name}.html"
    assert f"{file.name}: run {folder.name}, " in capsys.readouterr().out
    found = data_of(file)
    assert (found["run"]["id"], found["run"]["phase"], found["run"]["source"]) == (folder.name, "finished", "records")
    assert found["run"]["steps"] == 6
    assert found["curves"]["losses"]["step"] == list(range(6))  # the metrics have every step
    assert [each["step"] for each in found["timetable"]["steps"]] == list(range(6))
    assert dict(found["plan"]["plan"])["run.name"] == "tiny"
    assert "stageline train ." in dict(found["plan"]["environment"])["began with"]

    assert workspace.here("report", str(folder), "-o", "a/b.html") == 0
    again = data_of(workspace.folder / "a/b.html")
    assert {**again, "why": 0} == {**found, "why": 0}  # that names the folder as it was given


def test_a_run_that_never_began_has_a_page_that_says_why(workspace: Workspace) -> None:
    owner = RunOwner(
        pid=1, host="elsewhere", started=0.0, began=1.0, command="train", name="small", ended="no such model", code=78
    )
    (workspace.folder / "runs/small-1").mkdir(parents=True)
    workspace.write("runs/small-1/process.json", msgspec.json.encode(owner).decode())
    assert workspace.here("report", "-o", "run.html") == 0
    found = data_of(workspace.folder / "run.html")
    assert found["why"]["text"] == "no such model"
    assert found["timetable"]["steps"] == []
    assert dict(found["plan"]["environment"])["began on"] == "elsewhere, pid 1"


@pytest.mark.parametrize(
    ("arguments", "code", "named"), [(("nowhere",), 78, "nowhere does not exist"), ((), 3, "no run of small")]
)
def test_without_a_run_there_is_no_page(workspace: Workspace, capsys, arguments, code, named) -> None:
    assert workspace.here("report", *arguments, "-o", "run.html") == code
    assert named in capsys.readouterr().err
    assert not (workspace.folder / "run.html").exists()


@pytest.mark.slow
def test_the_broker_of_a_run_that_goes_on_is_asked(workspace: Workspace) -> None:
    training = workspace.start("train", ".", "--set", "run.steps=100000")
    wait_for(lambda: any(each.stat().st_size for each in workspace.folder.rglob("metrics.jsonl")))
    (folder,) = workspace.runs()
    wait_for(lambda: answer_about(str(folder), None, "status")["finished_floor"] > 8)

    def page() -> dict:
        made = workspace.command("report", str(folder), "-o", "run.html")
        assert made.returncode == 0, made.stderr
        return data_of(workspace.folder / "run.html")

    wait_for(lambda: page()["curves"]["workers"]["at"])  # measured once in a while
    found = page()
    assert (found["run"]["source"], found["run"]["phase"]) == ("broker", "running")
    assert len(found["stores"]["queues"]) >= 2
    assert workspace.command("run", "stop", "--now", str(folder)).returncode == 0
    training.wait()
