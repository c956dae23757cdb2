"""A bundle of a real run, made while it goes on and after all of it was killed, and what a maintainer reads in it."""

import json
import os
import shutil
import signal
import zipfile
from pathlib import Path

import jsonschema
import pytest

from stageline.workers.cli.schemas import schema_of
from support.workspace import Workspace, wait_for


def texts(file: Path) -> str:
    with zipfile.ZipFile(file) as archive:
        return "\n".join(archive.read(name).decode() for name in archive.namelist())


@pytest.mark.slow
def test_a_bundle_tells_what_the_commands_would_have_said_and_has_no_secret(workspace: Workspace) -> None:
    train = workspace.start("train", "--set", "run.steps=100000", "--set", "recovery.lease=600")
    wait_for(lambda: any(each.stat().st_size for each in workspace.folder.rglob("metrics.jsonl")))
    pid = workspace.worker(1)
    os.kill(pid, signal.SIGSTOP)
    wait_for(lambda: "was silent" in workspace.command("why").stdout)
    done = workspace.command("bundle", "-o", "up.zip", "--json")
    os.kill(pid, signal.SIGCONT)
    assert done.returncode == 0, done.stderr
    made = json.loads(done.stdout)
    jsonschema.validate(made, schema_of("bundle/1"))
    names = {each["name"] for each in made["files"]}
    assert names >= {"plan.json", "doctor.json", "status.json", "why.json", "queues.json", "stack.json"}
    assert names >= {"logs/worker-0.log", "logs/worker-1.log", "logs/broker.log"}
    with zipfile.ZipFile(workspace.folder / "up.zip") as archive:
        assert "assigned" in archive.read("logs/worker-0.log").decode()
    secret = (workspace.runs()[0] / "broker.secret").read_text()
    assert secret not in texts(workspace.folder / "up.zip")
    read = workspace.command("doctor", "--from", "up.zip", "--json")
    assert read.returncode == 0, read.stderr
    report = json.loads(read.stdout)
    jsonschema.validate(report, schema_of("doctor-from/1"))
    assert report["bundle"]["source"] == "broker"
    assert "was silent" in report["why"]["text"]
    assert {each["what"] for each in report["findings"]} >= {"python", "torch", "fingerprint"}
    assert report["plan"]["model"]["factory"] == "model.py:build"
    told = workspace.command("doctor", "--from", "up.zip").stdout
    assert all(each in told for each in ("was silent", "ok    torch: ", "schedule.microbatches = 3", "worker-1, pid"))
    again = workspace.command("bundle", "-o", "up.zip")
    assert "is there already" in again.stderr
    workspace.kill()
    train.wait()
    for left in workspace.temporary.iterdir():  # sockets: no process was left to remove them
        shutil.rmtree(left) if left.is_dir() else left.unlink()
    assert workspace.command("bundle", "-o", "gone.zip").returncode == 0
    told = workspace.command("doctor", "--from", "gone.zip").stdout
    assert ": killed" in told
    assert "what to do: " in told
    assert "stack.json" not in told
