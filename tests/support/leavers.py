"""A run whose workers are started by hand: some leave it, hang or are killed, and others take their places."""

import json
import signal
from functools import partial
from typing import Any

import jsonschema

from stageline.pipeline.errors import ExitCode
from stageline.workers.cli.schemas import schema_of
from stageline.workers.control.client import Client
from stageline.workers.runs.folder import read_control_secret
from support.workspace import Command, Workspace, free_port, until, wait_for

SLOW = """
import time
from pathlib import Path
from torch import nn

class Slow(nn.Module):
    def forward(self, x):
        time.sleep(float(Path(__file__).with_name("seconds").read_text()))
        return x

def build():
    return nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.Linear(8, 8), Slow(), nn.Linear(8, 2))

def accuracy(outputs, targets):
    return (outputs.argmax(1) == targets).float().mean()
"""
# No lease ends and no checkpoint is due in these runs: a place is free, and its successor begins, by the notice alone.
SETS = {"run.steps": 300, "recovery.snapshot_every": 1000, "recovery.restarts": 1, "recovery.lease": 600.0}


class RunWithLeavers:
    """A run whose broker and workers are started by hand; `never` is the digest of one that no worker has left."""

    def __init__(self, workspace: Workspace, url: str, **sets: float) -> None:
        self.workspace = workspace
        workspace.write("model.py", SLOW)
        self.takes("0")
        plain = [word for key, value in {**SETS, **sets}.items() for word in ("--set", f"{key}={value}")]
        found = workspace.command("train", *plain, "--set", "queues.url=memory://", "--set", "run.dir=never", "--json")
        self.never = json.loads(found.stdout)["weights_sha256"]
        self.takes("0.005")
        self._config = (".", *plain, "--set", f"queues.url={url}")
        self.broker = workspace.start("broker", *self._config, "--bind", f"tcp://127.0.0.1:{free_port()}")
        self.url = until(self.broker.stderr, "broker at").split("broker at ")[1].split(",")[0]
        self.workers = {index: self.start("--index", str(index), "--notice-seconds", "60") for index in (0, 1)}

    def takes(self, seconds: str) -> None:
        """Each forward of the slow layer takes so long from now on."""
        self.workspace.write("new", seconds)
        (self.workspace.folder / "new").replace(self.workspace.folder / "seconds")

    def start(self, *words: str, cold: bool = False) -> Command:
        return self.workspace.start("worker", *self._config, "--broker", self.url, *words, cold=cold)

    def is_present(self, pid: int) -> bool:
        """Whether the process has a place, and has computed there."""
        return any(each.get("pid") == pid and each["actions"] > 0 for each in self.status()["workers"])

    def status(self) -> dict[str, Any]:
        return self.asked("status")

    def asked(self, what: str) -> dict[str, Any]:
        with self.client() as client:
            return client.ask(what, timeout=10)

    def client(self) -> Client:
        return Client(self.url, partial(read_control_secret, self.workspace.runs()[-1]))

    def trains_beyond(self, step: int) -> None:
        wait_for(lambda: self.status()["finished_floor"] > step)

    def leaves(self, index: int, by: str) -> int:
        """The worker leaves, and its place is free. Returns the step of the checkpoint that it has left."""
        worker = self.workers[index]
        if by == "signal":
            worker.send_signal(signal.SIGTERM)
        else:
            done = self.workspace.command("run", "leave", str(index), "--reason", "a test", "--json")
            assert done.returncode == 0, done.stderr
            facts = json.loads(done.stdout)
            jsonschema.validate(facts, schema_of("run-leave/1"))
            assert (facts["worker"], facts["changed"]) == (index, True)
        _, stderr = worker.communicate()
        assert worker.returncode == ExitCode.LEFT, stderr
        assert "left on notice" in stderr
        wait_for(lambda: any(each["index"] == index and each["on_notice"] for each in self.status()["recovering"]))
        return int(self.status()["checkpoint"])

    def ends(self) -> list[dict[str, Any]]:
        """The milestones of the run once it has finished, to the bits of the one that no worker has left."""
        for worker in self.workers.values():
            _, stderr = worker.communicate()
            assert worker.returncode == 0, stderr
        status, history = self.status(), self.asked("history")
        assert (status["phase"], status["weights_sha256"]) == ("finished", self.never)
        with self.client() as client:
            client.dismiss()
        assert self.broker.wait() == 0
        return list(history["milestones"])
