"""Machines that meet at a Redis server elsewhere, each with a key of its own: what it learns, and who may speak."""

import json
import os
import re
import shutil
import signal
import socket
import struct
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from support.byte_tap import ByteTap, bytes_of, recorded, rows_of
from support.fork_server import ForkServer
from support.redis_server import RedisServer
from support.whole_run import expected, plan_in
from support.workspace import Command, Workspace, until, wait_for

STEPS = 8
RUN = "together"
_LINE = re.compile(r"--join '([^']+)'")
PLAN_TEXTS = (b"torch.nn.functional.cross_entropy", b"model.py:build", b"data.py:batches", b"batch_size")


class KeyedParty:
    """A broker and workers, each with a key file and a folder of its own, at the server on `port`."""

    def __init__(self, workspace: Workspace, plan: Path, port: int, **settings: str) -> None:
        self._workspace, self._home = workspace, plan.parent.parent
        self._plan = str(plan)
        self.url = f"redis://127.1:{port}/0"  # a name that does not tell that it is this machine
        places = {"QUEUES__URL": self.url, "BROKER__URL": f"{self.url}#desk", "BROKER__STORE": self.url, **settings}
        self._settings = {f"STAGELINE_{name}": value for name, value in places.items()}
        self.broker = self.start_broker()
        self.line = self.printed()

    def start_broker(self, machine: str = "broker") -> Command:
        self._of_broker = machine
        return self._start(machine, "broker", "--run", RUN)

    def worker(self, machine: str, line: str = "") -> Command:
        joins = ("--join", line or self.line) if self.line else ()
        return self._start(machine, "worker", *joins, "--name", machine)

    def ask(self, *words: str, machine: str = "broker") -> str:
        """Text that a command prints on a machine."""
        done = self._workspace.command(*words, **self._of(machine))
        return done.stdout + done.stderr

    def finished(self) -> int:
        """How many steps all stages have finished, by the answer that the operator gets."""
        run = f"{self._home}/runs-of-{self._of_broker}/{RUN}"
        facts = json.loads(self.ask("status", run, "--json", machine=self._of_broker).splitlines()[-1])
        return int(facts["finished_floor"])

    def end(self, *workers: Command) -> dict[str, Any]:
        """The result, once the workers have exited."""
        for worker in workers:
            said = worker.communicate()[1]
            assert worker.returncode == 0, said
        self.broker.send_signal(signal.SIGTERM)  # it would stay for a while, to answer how the run ended
        said = self.broker.communicate()[1]
        assert self.broker.returncode == 0, said
        return json.loads((self._home / f"runs-of-{self._of_broker}" / RUN / "result.json").read_text())

    def _start(self, machine: str, command: str, *options: str) -> Command:
        return self._workspace.start(command, self._plan, *options, **self._of(machine))

    def _of(self, machine: str) -> dict[str, str]:
        own = {
            "STAGELINE_KEY_FILE": f"{self._home}/{machine}.key",
            "STAGELINE_RUN__DIR": f"{self._home}/runs-of-{machine}",
        }
        return {"STAGELINE_RUN__STEPS": str(STEPS), **self._settings, **own}

    def printed(self) -> str:
        """The join line that the broker prints; "" if it has no keys."""
        assert self.broker.stderr is not None
        while "start every worker with" not in (said := self.broker.stderr.readline()):
            assert said, "the broker has ended"
        found = _LINE.search(said)
        return found[1] if found else ""


def learnt(taps: Path, needles: Mapping[str, Iterable[bytes]]) -> set[str]:
    """Needles in all bytes that passed."""
    streams = recorded(taps)
    return {what for what, forms in needles.items() if any(form in seen for form in forms for seen in streams)}


def numbers(values: Iterable[float]) -> Iterator[bytes]:
    """The forms in which numbers may travel."""
    for value in values:
        yield from (repr(value).encode(), struct.pack(">d", value), struct.pack("<d", value))


@pytest.fixture
def taps(tmp_path: Path) -> Path:
    folder = tmp_path / "taps"
    folder.mkdir()
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("insecure", [False, True], ids=["keys", "insecure"])
def test_a_server_in_the_middle_learns_nothing_that_is_said(
    insecure: bool, redis: RedisServer, workspace: Workspace, tmp_path: Path, taps: Path
) -> None:
    """Without keys it learns all of it, so that these are the right words to look for."""
    with ByteTap(f"tcp://127.0.0.1:{redis.port}", taps) as tap:
        party = KeyedParty(workspace, plan_in(tmp_path), port_of(tap), BROKER__INSECURE=str(insecure).lower())
        workers = [party.worker(f"machine-of-anna-{index}") for index in range(2)]
        status = party.ask("status", f"{tmp_path}/runs-of-broker/{RUN}")
        result = party.end(*workers)
    assert result["weights_sha256"] == expected(STEPS)
    assert RUN in status
    needles = {
        "losses": numbers(result["losses"].values()),
        "host names": [msgspec.msgpack.encode("host") + msgspec.msgpack.encode(socket.gethostname())],
        "names": [b"machine-of-anna"],
        "plan": PLAN_TEXTS,
        "messages": [b"SLMG"],
    }
    assert learnt(taps, needles) == (set(needles) if insecure else set())


NET = """
from collections import OrderedDict

import torch
from torch import nn


def build():
    torch.manual_seed(0)
    layers = OrderedDict(gate_of_anna=nn.Linear(6, 16), bend=nn.GELU(), answer_of_anna=nn.Linear(16, 300))
    return nn.Sequential(layers)
"""
SCRIPT = """
import sys
from functools import partial

import net
import torch
from stageline import Line
from torch import nn

inputs = torch.rand(3, 8, 6, generator=torch.Generator().manual_seed(7))
labels = torch.randint(300, (3, 8), generator=torch.Generator().manual_seed(8))
sgd = partial(torch.optim.SGD, lr=0.1)
line = Line(net.build, cut=[1], loss=nn.functional.cross_entropy, optimizer=sgd, microbatches=2, broker=sys.argv[1],
            settings={"broker.insecure": sys.argv[2] == "insecure"})
with line:
    for at in range(3):
        line.step(inputs[at], labels[at])
    torch.save({"inputs": inputs.flatten(0, 1), "labels": labels.flatten(), **line.state_dict()}, "said.pt")
"""


@pytest.mark.slow
@pytest.mark.parametrize("way", ["keys", "insecure"])
def test_a_server_in_the_middle_learns_nothing_of_a_scripts_rows_and_weights(
    way: str, redis: RedisServer, workspace: Workspace, fork_server: ForkServer, tmp_path: Path, taps: Path
) -> None:
    (tmp_path / "there").mkdir()
    for folder in (workspace.folder, tmp_path / "there"):
        (folder / "net.py").write_text(NET)
    (workspace.folder / "script.py").write_text(SCRIPT)
    with ByteTap(f"tcp://127.0.0.1:{redis.port}", taps) as tap, Workspace(tmp_path / "there", fork_server) as there:
        url = f"redis://127.1:{port_of(tap)}/0"
        script = workspace.start("script", "script.py", url, way, STAGELINE_KEY_FILE=f"{tmp_path}/broker.key")
        line = url if way == "insecure" else until(script.stderr, "--join '").partition("--join '")[2].partition("'")[0]
        renounced = {"STAGELINE_BROKER__INSECURE": "true"} if way == "insecure" else {}
        workers = [
            there.start("worker", "--join", line, STAGELINE_KEY_FILE=f"{tmp_path}/{index}.key", **renounced)
            for index in range(2)
        ]
        log = script.communicate()[1]
        assert script.returncode == 0, log
        assert [worker.wait() for worker in workers] == [0, 0]
    said = torch.load(workspace.folder / "said.pt", weights_only=True)
    inputs, labels = said.pop("inputs"), said.pop("labels")
    needles = {
        "rows": rows_of(inputs),
        "labels": [bytes_of(labels[at : at + 4]) for at in range(0, 24, 4)],
        "weights": [row for name, weight in said.items() if name.endswith("weight") for row in rows_of(weight)],
        "parameter names": [name.encode() for name in said],
    }
    assert learnt(taps, needles) == (set(needles) if way == "insecure" else set())


@pytest.mark.slow
def test_a_machine_with_another_key_and_an_empty_disk_takes_the_place_of_one_that_is_lost(
    redis: RedisServer, workspace: Workspace, tmp_path: Path
) -> None:
    """It computes everything again, from messages that were sealed for the place and not for the machine."""
    settings = {"RUN__STEPS": "24", "RECOVERY__SNAPSHOT_EVERY": "1000", "RECOVERY__LEASE": "5s"}
    party = KeyedParty(workspace, plan_in(tmp_path), redis.port, **settings)
    kept, lost = party.worker("desk"), party.worker("tower")
    wait_for(lambda: party.finished() >= 3)
    os.kill(lost.pid, signal.SIGKILL)
    lost.wait()
    shutil.rmtree(tmp_path / "runs-of-tower", ignore_errors=True)  # it may not have written anything yet
    result = party.end(kept, party.worker("laptop"))
    assert result["weights_sha256"] == expected(24)


@pytest.mark.slow
def test_a_broker_that_is_lost_goes_on_at_another_machine_that_has_its_key_file_and_at_no_other(
    redis: RedisServer, workspace: Workspace, tmp_path: Path
) -> None:
    settings = {"RUN__STEPS": "24", "RECOVERY__LEASE": "5s"}
    party = KeyedParty(workspace, plan_in(tmp_path), redis.port, **settings)
    workers = [party.worker(name) for name in ("desk", "tower")]
    wait_for(lambda: party.finished() >= 2)
    os.kill(party.broker.pid, signal.SIGKILL)
    party.broker.wait()
    shutil.copy(tmp_path / "broker.key", tmp_path / "laptop.key")
    party.broker = party.start_broker("laptop")
    assert party.end(*workers)["weights_sha256"] == expected(24)
    stranger = party.start_broker("stranger")
    said = stranger.communicate()[1]
    assert stranger.returncode == 1
    assert "are sealed with another key than this process has" in said


@pytest.mark.slow
def test_a_key_that_knocks_is_named_and_works_once_it_is_admitted_and_not_once_it_is_revoked(
    redis: RedisServer, workspace: Workspace, tmp_path: Path
) -> None:
    party = KeyedParty(workspace, plan_in(tmp_path), redis.port)
    address = party.line.rsplit(".", 2)[0]  # without the invitation
    guest, run = party.worker("tower", address), f"{tmp_path}/runs-of-broker/{RUN}"
    knock = until(guest.stderr, "stageline keys admit k1.").partition("keys admit ")[2].split()[0].strip("`.")
    assert knock in party.ask("keys", "ls", run)
    assert "may work" in party.ask("keys", "admit", knock, run)
    party.end(party.worker("desk"), guest)
    party.broker = party.start_broker()
    assert party.printed() == party.line
    assert "is revoked" in party.ask("keys", "revoke", knock, run)
    refused = party.worker("tower", address)
    assert "keys admit" in until(refused.stderr, "stageline keys admit k1.")
    workspace.kill()
    wait_for(lambda: not workspace.processes())


def port_of(tap: ByteTap) -> int:
    return int(tap.endpoint.rpartition(":")[2])
