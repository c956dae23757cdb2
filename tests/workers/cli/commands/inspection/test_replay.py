"""`stageline replay`: bits that differ, records that are damaged or missing."""

import pytest

from stageline.workers.extras.recording.records import RecordDirectory
from support.answers import conforming
from support.workspace import MODEL


@pytest.mark.slow
def test_bits_of_changed_code_are_reported_as_different(workspace, capsys):
    recovery = ("recovery.record=all", "recovery.restarts=1", "recovery.snapshot_every=3")
    assert workspace.command("train", ".", *(word for each in recovery for word in ("--set", each))).returncode == 0
    (run,) = workspace.runs()
    place = ("--stage", "1", "--step", "4", "--microbatch", "1")
    assert workspace.here("replay", str(run), *place) == 0
    assert "1B1  float32 [2, 8]: the bits as recorded" in capsys.readouterr().out
    workspace.write("model.py", MODEL.replace("nn.Linear(8, 2))", "nn.Linear(8, 2), nn.Softplus())"))
    other = workspace.command("replay", str(run), *place, "--json")  # in a process that has not loaded the old code
    assert other.returncode == 1
    assert conforming(other.stdout)["outcomes"][0]["same"] is False
    assert "the bits are not the recorded ones" in other.stderr
    (segment,) = RecordDirectory(run, 1).folder.glob("step-0000000003.*")
    segment.write_bytes(b"?" + segment.read_bytes())
    assert workspace.here("replay", str(run), *place) == 1
    assert f"{segment.name}, byte 0: the file is damaged" in capsys.readouterr().err


def test_a_run_or_a_record_that_is_missing_is_reported(workspace, capsys):
    unknown = workspace.here("replay", ".", "--stage", "0", "--step", "0", "--microbatch", "0")
    assert (unknown, "no run of small is in" in capsys.readouterr().err) == (2, True)
    assert workspace.here("train", ".", "--set", "queues.url=memory://") == 0
    assert workspace.here("replay", ".", "--stage", "0", "--step", "0", "--microbatch", "0") == 2
    assert 'recovery.record = "bad" records what stops a run' in capsys.readouterr().err
