"""A run that is paused, with real processes: what is killed meanwhile changes no bit, and the run can be stopped."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch

from stageline.broker.keys.join_line import keyed
from stageline.pipeline.errors import ExitCode
from stageline.workers.cli.schemas import schema_of
from support.machines import line_in
from support.workspace import Command, Workspace, until, wait_for

SLOW = """
import time
from pathlib import Path
from torch import nn

class Slow(nn.Module):
    def forward(self, x):
        time.sleep(float(Path(__file__).with_name("seconds").read_text()))
        return x

def build():
    return nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), Slow(), nn.Linear(8, 2))

def accuracy(outputs, targets):
    return (outputs.argmax(1) == targets).float().mean()
"""
STEPS = ("--set", "run.steps=400", "--set", "recovery.snapshot_every=50")


class PausedRun:
    """A run of the small plan, whose steps take a while; `never` is the digest of one that was never paused."""

    def __init__(self, workspace: Workspace, *sets: str) -> None:
        self.workspace = workspace
        workspace.write("model.py", SLOW)
        workspace.write("seconds", "0")
        found = workspace.command("train", *STEPS, "--set", "queues.url=memory://", "--set", "run.dir=never", "--json")
        self.never = json.loads(found.stdout)["weights_sha256"]
        workspace.write("seconds", "0.005")
        self.train = workspace.start("train", *STEPS, *sets, "--json")
        wait_for(lambda: bool(self.trained()))

    def trained(self) -> list[Path]:
        return [each for each in self.workspace.runs() for each in each.rglob("metrics.jsonl") if each.stat().st_size]

    def says(self, *words: str) -> dict[str, Any]:
        """Facts that a command prints with --json; it must end well."""
        done = self.workspace.command(*words, "--json")
        assert done.returncode == 0, done.stderr
        found: dict[str, Any] = json.loads(done.stdout)
        return found

    def pause(self) -> int:
        """Returns the step of the pause, before which all steps are finished."""
        found = self.says("run", "pause", "--reason", "a backup")
        jsonschema.validate(found, schema_of("run-pause/1"))
        assert (found["changed"], found["paused"]["in_effect"], found["paused"]["reason"]) == (True, True, "a backup")
        self.demand(found["paused"]["step"])
        return int(found["paused"]["step"])

    def demand(self, step: int) -> None:
        """It is paused before `step`, soon or now, and is no further."""
        wait_for(lambda: bool((self.status()["paused"] or {}).get("in_effect")))
        status = self.status()
        assert status["paused"]["step"] == step
        assert status["finished"] == [step, step]

    def status(self) -> dict[str, Any]:
        return self.says("status")

    def resume(self) -> dict[str, Any]:
        """Its result."""
        found = self.says("run", "resume")
        jsonschema.validate(found, schema_of("run-resume/1"))
        assert (found["changed"], found["paused"]) == (True, None)
        return result(self.train)

    def kill(self, process: str) -> None:
        pid = self.workspace.process(process)
        os.kill(pid, signal.SIGKILL)
        wait_for(lambda: not Path(f"/proc/{pid}").exists())


def result(train: Command) -> dict[str, Any]:
    stdout, stderr = train.communicate()
    assert train.wait() == 0, stderr
    found: dict[str, Any] = json.loads(stdout)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["shm", "tcp", "redis"])
def test_a_paused_run_survives_the_kill_of_its_broker_and_of_a_worker_to_the_bit(
    workspace: Workspace, transport: str, request: pytest.FixtureRequest
) -> None:
    urls = {"shm": "shm://", "tcp": "tcp://127.0.0.1:0"}
    url = urls.get(transport) or request.getfixturevalue("redis").url
    run = PausedRun(workspace, "--set", f"queues.url={url}")
    step = run.pause()
    assert run.says("why")["root"]["cause"] == "paused"
    assert run.says("queue", "ls")["paused"]["step"] == step
    told = workspace.command("status").stdout + workspace.command("queue", "ls").stdout
    assert told.count(f", before step {step} (a backup)") == 2
    (listed,) = run.says("run", "ls")["runs"]
    assert (listed["state"], "a backup" in listed["reason"]) == ("paused", True)
    assert run.says("run", "show")["state"] == "paused"
    run.kill("worker-0")
    wait_for(lambda: run.status()["restarts"] == 1)
    run.demand(step)
    run.kill("broker")
    assert run.says("run", "ls")["runs"][0]["state"] == "paused"  # of the records: no broker need be there
    run.demand(step)
    run.kill("worker-1")
    run.kill("broker")
    wait_for(lambda: run.status()["restarts"] == 2)
    run.demand(step)
    drawn = run.resume()
    assert drawn["weights_sha256"] == run.never
    assert workspace.command("run", "resume").returncode == ExitCode.NO_BROKER
    (pause,) = run.says("run", "show")["pauses"]
    assert (pause["step"], pause["reason"], pause["until"] > pause["since"]) == (step, "a backup", True)
    assert f"before step {step} (a backup)" in workspace.command("run", "show").stdout
    (table,) = run.says("timetable", "--step", str(step))["steps"]
    paused = {each["worker"] for each in table["idle"] if each["cause"] == "paused"}
    assert paused == {0, 1}


@pytest.mark.slow
def test_a_run_that_is_paused_twice_ends_as_one_that_never_was_and_is_not_told_to_be_slow(
    workspace: Workspace,
) -> None:
    run = PausedRun(workspace)
    first = run.pause()
    again = run.says("run", "pause")
    assert (again["changed"], again["paused"]["step"]) == (False, first)
    assert run.says("run", "resume")["changed"]
    wait_for(lambda: run.status()["finished_floor"] > first + 4)
    second = run.pause()
    assert second > first
    assert run.resume()["weights_sha256"] == run.never
    why = run.says("why")
    assert not [each for each in (why["recovery"] or {"setbacks": []})["setbacks"] if each["what"] == "stall"]
    limits = why["slow"]
    assert limits is None or limits["steps"][0] > second
    assert not [each for each in (limits or {"findings": []})["findings"] if each["cause"] == "paused"]


@pytest.mark.slow
@pytest.mark.parametrize("by", ["run stop", "ctrl-c"])
def test_a_paused_run_can_be_stopped_and_is_resumed_without_a_pause(workspace: Workspace, by: str) -> None:
    run = PausedRun(workspace)
    step = run.pause()
    if by == "run stop":
        assert run.says("run", "stop")["checkpoint"] == step
    else:
        os.kill(run.train.pid, signal.SIGINT)
    _, stderr = run.train.communicate()
    assert run.train.wait() == ExitCode.SAVED, stderr
    assert f"the state after {step} steps is saved" in stderr
    workspace.write("seconds", "0")
    assert result(workspace.start("train", *STEPS, "--resume", "--json"))["weights_sha256"] == run.never


@pytest.mark.slow
def test_a_pause_by_a_key_needs_the_right_to_stop(workspace: Workspace) -> None:
    keys = {name: {"STAGELINE_KEY_FILE": str(workspace.folder / f"{name}.key")} for name in ("desk", "lab", "owner")}
    sets = ("--set", "queues.url=tcp://127.0.0.1:0", "--set", "run.steps=100000")
    broker = workspace.start("broker", ".", "--bind", "tcp://0.0.0.0:0", *sets, **keys["desk"])
    line = line_in(until(broker.stderr, "start every worker with"))
    join = {**keys["lab"], "STAGELINE_JOIN": line.text}
    workers = [workspace.start("worker", ".", "--set", f"run.dir=lab-{each}", *sets, **join) for each in range(2)]
    wait_for(lambda: any(each.stat().st_size for each in workspace.folder.rglob("metrics.jsonl")))
    address = keyed(line.address, line.broker)
    refused = workspace.command("run", "pause", "--broker", address, **keys["lab"])
    assert refused.returncode == ExitCode.NOT_ADMITTED
    assert "no right to stop" in refused.stderr
    public = json.loads(workspace.command("keys", "new", "--json", **keys["owner"]).stdout)["key"]
    assert (
        workspace.command("keys", "admit", public, "--right", "stop", "--as", "owner", **keys["desk"]).returncode == 0
    )
    done = workspace.command("run", "pause", "--broker", address, **keys["owner"])
    assert done.returncode == 0, done.stderr
    assert "paused by owner since" in done.stdout
    assert workspace.command("run", "resume", "--broker", address, **keys["owner"]).returncode == 0
    stopped = workspace.command("run", "stop", "--broker", address, **keys["owner"])
    assert stopped.returncode == 0, stopped.stderr
    assert [each.wait() for each in (*workers, broker)] == [ExitCode.SAVED] * 3
    log = [json.loads(each) for each in (workspace.runs()[0] / "keys.log").read_text().splitlines()]
    assert [each["what"] for each in log if each["key"] == public][-3:] == ["paused", "resumed", "stopped"]


SCRIPT = """
import sys
import time
from functools import partial
from pathlib import Path

import torch
from torch import nn

from stageline import Line

def build():
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))

rows = torch.randn(6, 4, generator=torch.Generator().manual_seed(2))
targets = (rows.sum(1) > 0).long()
loss, optimizer = nn.functional.cross_entropy, partial(torch.optim.SGD, lr=0.1)
with Line(build, cut=[2], loss=loss, optimizer=optimizer, microbatches=3, folder=sys.argv[1]) as line:
    for step in range(300):
        time.sleep(float(sys.argv[2]))
        line.step(rows, targets)
    weights = line.state_dict()
    torch.save(weights, sys.argv[1] + ".pt")
"""


@pytest.mark.slow
def test_a_scripts_run_pauses_too_and_its_weights_are_those_of_one_that_never_did(workspace: Workspace) -> None:
    workspace.write("script.py", SCRIPT)
    first = _script(workspace, "runs/never", "0")
    _, stderr = first.communicate()
    assert first.returncode == 0, stderr
    script = _script(workspace, "runs/paused", "0.02")
    folder = workspace.folder / "runs" / "paused"
    wait_for(lambda: any(each.stat().st_size for each in folder.rglob("metrics.jsonl")))
    where = ("run", "pause", str(next(each.parent for each in folder.rglob("process.json"))))
    done = workspace.command(*where, "--json")
    assert done.returncode == 0, done.stderr
    step = json.loads(done.stdout)["paused"]["step"]
    why = json.loads(workspace.command("why", where[2], "--json").stdout)
    assert why["root"]["cause"] == "paused"
    status = json.loads(workspace.command("status", where[2], "--json").stdout)
    assert status["finished"] == [step, step]
    assert workspace.command("run", "resume", where[2]).returncode == 0
    _, stderr = script.communicate()
    assert script.returncode == 0, stderr
    assert "the run is paused by" in stderr
    files = (workspace.folder / "runs" / f"{name}.pt" for name in ("never", "paused"))
    never, paused = (torch.load(file, weights_only=True) for file in files)
    assert never.keys() == paused.keys()
    assert all(torch.equal(never[name], paused[name]) for name in never)


def _script(workspace: Workspace, folder: str, seconds: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "script.py", folder, seconds],
        cwd=workspace.folder,
        env={**os.environ, "TMPDIR": str(workspace.temporary), "STAGELINE_KEY_FILE": str(workspace.key)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
