"""A real run over TCP, of a broker and two workers, that goes on slowly until an attack on it is over."""

import json
import signal
from collections import deque
from collections.abc import Mapping
from time import monotonic, sleep

import psutil

from stageline.broker.control.messages import Assigned
from stageline.broker.control.protocol import decode_from_broker
from stageline.workers.control.client import Client
from support.hostile import frame, frames_in, is_between_frames
from support.paths import TESTS
from support.proxy import Proxy
from support.workspace import Command, Workspace, free_port, until, wait_for

STEPS = 60
PATIENCE = 60.0  # seconds for its workers to join
CALM = "calm"  # the file whose existence ends the slow part
SLOW_MODEL = f"""
import os
from threading import Event
from torch import nn

class Slow(nn.Module):
    def forward(self, x):
        if not os.path.exists("{CALM}"):
            Event().wait(0.1)
        return x

def build():
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), Slow(), nn.Linear(8, 2))

def accuracy(outputs, targets):
    return (outputs.argmax(1) == targets).float().mean()
"""
SETTINGS = ("--set", f"run.steps={STEPS}", "--set", "run.log_every=20", "--set", "recovery.snapshot_every=10")


RECORDING = f"""
import sys
from stageline.workers.process import worker

sys.path.append({str(TESTS)!r})

from support.proxy import Proxy

def _recorded(endpoint, broker, plain=worker.reachable):
    here = plain(endpoint, broker)
    proxy, record = Proxy(here), open("requests-" + here.rpartition(":")[2], "ab", buffering=0)
    proxy.change_there = lambda passing: (passing, record.write(passing))[0]
    return proxy.endpoint

worker.reachable = _recorded
"""

_DIGESTS: list[str] = []


class Eavesdropper(Proxy):
    """On the path between a worker and its broker: it hears what both say, and can say more in the broker's name."""

    def __init__(self, broker: str) -> None:
        super().__init__(broker)
        self.said = bytearray()
        self._heard = bytearray()
        self._injected: deque[bytes] = deque()
        self.change_there = self._note
        self.change = self._inject

    @property
    def recorded(self) -> list[bytes]:
        """Messages of the broker to the worker so far."""
        return frames_in(bytes(self._heard))

    @property
    def assigned(self) -> Assigned:
        """The worker's place, with its secret."""
        heard = (decode_from_broker(each).message for each in self.recorded)
        return next(each for each in heard if isinstance(each, Assigned))

    def inject(self, *messages: bytes) -> None:
        """The worker gets these messages before the broker's next one. Returns once they are on their way."""
        self._injected.extend(map(frame, messages))
        wait_for(lambda: not self._injected)

    def _note(self, passing: bytes) -> bytes:
        self.said += passing
        return passing

    def _inject(self, passing: bytes) -> bytes:
        between = len(self._heard) > 64 and is_between_frames(bytes(self._heard))
        self._heard += passing
        injected = b"".join(self._injected) if between else b""
        if between:
            self._injected.clear()
        return injected + passing


class RunUnderAttack:
    """`broker` and `workers` are its processes, `broker_url` and `worker_urls` where they listen.

    `recorded`: what worker 0 sends to the broker, and what each worker's queues are sent, is kept for `records`.
    `listened`: there is one of `listeners` between each worker and the broker.
    """

    def __init__(self, workspace: Workspace, *, recorded: bool = False, listened: bool = False) -> None:
        self._workspace = workspace
        self._recorded = recorded
        workspace.write("model.py", SLOW_MODEL + (RECORDING if recorded else ""))
        plan = (".", *SETTINGS, "--set", "queues.url=tcp://127.0.0.1:0")
        self.broker_url = f"tcp://127.0.0.1:{free_port()}"
        self.broker = workspace.start("broker", *plan, "--bind", self.broker_url)
        until(self.broker.stderr, "broker at")
        self.listeners = [Eavesdropper(self.broker_url) for _ in range(2)] if recorded or listened else []
        urls = [each.endpoint for each in self.listeners] or 2 * [self.broker_url]
        self.workers = [workspace.start("worker", *plan, "--broker", url) for url in urls]
        self.wait_until_it_trains()
        self.worker_urls = [] if recorded else [_listens_at(worker.pid) for worker in self.workers]

    @property
    def records(self) -> dict[str, bytes]:
        """Bytes that have come to each endpoint over one connection so far."""
        files = self._workspace.folder.glob("requests-*")
        queues = {f"tcp://127.0.0.1:{file.name.rpartition('-')[2]}": file.read_bytes() for file in files}
        return {self.broker_url: bytes(self.listeners[0].said), **queues}

    @property
    def processes(self) -> Mapping[str, Command]:
        return {"broker": self.broker, **{f"worker {i}": worker for i, worker in enumerate(self.workers)}}

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self.processes.values()]

    def status(self) -> dict[str, object]:
        with Client(self.broker_url) as client:
            return client.ask("status", timeout=10.0)

    def wait_until_it_trains(self) -> None:
        deadline = monotonic() + PATIENCE
        while monotonic() < deadline:
            if self.status()["phase"] == "running":
                return
            sleep(0.02)
        raise AssertionError(f"it does not train: {self.status()}")

    def end(self) -> tuple[str, dict[str, str]]:
        """Lets the run end. Its digest, and what each process has logged."""
        self._workspace.write(CALM, "")
        logs = {}
        for name, worker in list(self.processes.items())[1:]:
            _, logs[name] = worker.communicate()
            assert worker.returncode == 0, logs[name]
        for listener in self.listeners:
            listener.__exit__(None, None, None)
        digest = str(self.status()["weights_sha256"])
        self.broker.send_signal(signal.SIGTERM)
        _, logs["broker"] = self.broker.communicate()
        return digest, logs


def undisturbed_digest(workspace: Workspace) -> str:
    """Of the same run, in one process and quick; it is run once."""
    if not _DIGESTS:
        workspace.write("model.py", SLOW_MODEL)
        workspace.write(CALM, "")
        ended = workspace.command("train", ".", *SETTINGS, "--set", "queues.url=memory://", "--json")
        (workspace.folder / CALM).unlink()
        _DIGESTS.append(str(json.loads(ended.stdout)["weights_sha256"]))
    return _DIGESTS[0]


def _listens_at(pid: int) -> str:
    """Where a worker's queues are."""
    found = psutil.Process(pid).net_connections(kind="tcp")
    (port,) = {each.laddr.port for each in found if each.status == psutil.CONN_LISTEN}
    return f"tcp://127.0.0.1:{port}"
