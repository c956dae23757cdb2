"""`stageline trace export` of a run that was trained, and of one whose broker is there."""

import json
from pathlib import Path

import jsonschema
import pytest

from stageline.workers.cli.commands import trace
from stageline.workers.cli.options import answer_about
from stageline.workers.cli.schemas import schema_of
from support.traces import ReadTrace, read_trace
from support.workspace import wait_for


@pytest.fixture
def trained(workspace, capsys):
    assert workspace.here("train", ".", "--set", "queues.url=memory://", "--set", "recovery.snapshot_every=2") == 0
    capsys.readouterr()
    return workspace


def steps_in(file: Path) -> tuple[ReadTrace, dict[object, int]]:
    """The trace, and by step the number of its actions."""
    found = read_trace(file.read_bytes())
    steps = [each.notes["step"] for each in found.slices if "/stage " in each.track]
    return found, {step: steps.count(step) for step in steps}


def test_a_run_is_exported_whole_or_in_part_after_its_end(trained, capsys, monkeypatch):
    assert trained.here("trace", "export", "-o", "run.pftrace", "--json") == 0
    told = json.loads(capsys.readouterr().out)
    jsonschema.validate(told, schema_of("trace-export/1"))
    found, steps = steps_in(trained.folder / "run.pftrace")
    assert steps == dict.fromkeys(range(6), 14)  # of two stages: three F, three B and a U
    assert (told["steps"], told["slices"]) == ([0, 5], len(found.slices))
    assert told["bytes"] == (trained.folder / "run.pftrace").stat().st_size
    tracks = {each.track.partition(" on ")[0] for each in found.slices if "/stage " in each.track}
    assert tracks == {"worker 0", "worker 1"}
    assert len(found.counts[f"run {told['run']}/loss"]) == 3  # of every second step

    for at_once in (63, 1):  # steps in one answer
        monkeypatch.setattr(trace, "_MOST", at_once)
        assert trained.here("trace", "export", "--steps", "2..99", "-o", "part.pftrace") == 0
        part, steps = steps_in(trained.folder / "part.pftrace")
        assert steps == dict.fromkeys(range(2, 6), 14)
        assert len(part.instants) <= len(found.instants)
    assert "steps 2 to 5 of run small-" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "code", "named"),
    [
        (("--steps", "6..9"), 2, ("6..9", "steps 0 to 5 are finished")),
        (("--steps", "4..2"), 2, ("4..2", "steps 0 to 5 are finished")),
        (("--steps", "four"), 2, ("A..B",)),
        (("nowhere",), 78, ("nowhere does not exist",)),
    ],
)
def test_what_cannot_be_exported_is_refused_and_leaves_no_file(trained, capsys, arguments, code, named):
    assert trained.here("trace", "export", *arguments, "-o", "run.pftrace") == code
    told = capsys.readouterr().err
    assert all(each in told for each in named)
    assert not list(trained.folder.glob("*pftrace*"))


def test_a_run_whose_records_were_deleted_has_no_times_to_export(trained, capsys):
    (folder,) = trained.runs()
    (folder / "broker.sqlite").unlink()
    assert trained.here("trace", "export", "-o", "run.pftrace") == 2
    assert "no times are known of steps 0..5" in capsys.readouterr().err
    assert not list(trained.folder.glob("*pftrace*"))


@pytest.mark.slow
def test_the_broker_of_a_run_that_goes_on_is_asked(workspace):
    training = workspace.start("train", ".", "--set", "run.steps=100000")
    wait_for(lambda: any(each.stat().st_size for each in workspace.folder.rglob("metrics.jsonl")))
    (folder,) = workspace.runs()
    wait_for(lambda: answer_about(str(folder), None, "status")["finished_floor"] > 8)
    exported = workspace.command("trace", "export", str(folder), "--steps", "1..8", "-o", "run.pftrace")
    assert exported.returncode == 0, exported.stderr
    _, steps = steps_in(workspace.folder / "run.pftrace")
    assert steps == dict.fromkeys(range(1, 9), 14)
    assert workspace.command("run", "stop", "--now", str(folder)).returncode == 0
    training.wait()
