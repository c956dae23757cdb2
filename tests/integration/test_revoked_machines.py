"""A machine's key is revoked while a run goes on: another machine takes its place, and what it knows is of no use."""

import json
import os
import re
import signal
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from stageline.broker.keys.join_line import JoinLine
from stageline.pipeline.errors import ExitCode
from support.fork_server import ForkServer
from support.machines import GATED, broker_at, present
from support.redis_server import RedisServer
from support.workspace import Workspace, wait_for

SETS = ("--set", "recovery.lease=60", "--set", "recovery.action=600", "--set", "recovery.snapshot_every=1")


@pytest.fixture
def machines(tmp_path: Path, fork_server: ForkServer, stack: ExitStack) -> list[Workspace]:
    """Each with a key of its own."""
    found = []
    for name in ("desk", "lab", "clinic"):
        (tmp_path / name).mkdir()
        found.append(stack.enter_context(Workspace(tmp_path / name, fork_server)))
        found[-1].write("model.py", GATED)
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("queues", "at"), [("tcp", "tcp"), ("redis", "tcp"), ("redis", "redis")])
def test_another_machine_takes_the_place_at_once_and_the_run_ends_as_if_nothing_had_been(
    queues: str, at: str, machines: list[Workspace], redis: RedisServer
) -> None:
    """The lease has not ended by then. The worker that stays is in the middle of an action."""
    desk, lab, clinic = machines
    urls = {"tcp": "tcp://0.0.0.0:0", "redis": f"redis://127.1:{redis.port}/0"}
    shared = f"run.dir={desk.folder / 'runs'}"  # where the snapshots are
    sets = (*SETS, "--set", f"queues.url={urls[queues]}", "--set", shared)
    wanted = json.loads(desk.command("train", "--json", *SETS, "--set", "run.dir=plain").stdout)["weights_sha256"]
    os.mkfifo(desk.folder / "gate")
    broker, line = broker_at(desk, urls[at], *sets)
    stays = desk.start("worker", ".", "--join", line.text, "--index", "0", "--name", "stays", *sets)
    out = lab.start("worker", ".", "--join", line.text, "--index", "1", "--name", "out", *sets)
    wait_for(lambda: len(present(desk)) == 2)
    key = lab.command("keys", "show").stdout.strip()
    revoked = desk.command("keys", "revoke", re.findall(r"k1\.\S+", key)[0])
    assert revoked.returncode == 0, revoked.stderr
    refused = lab.command("worker", ".", "--join", line.text, STAGELINE_KEY_FILE=str(lab.folder / "other.key"))
    assert refused.returncode == ExitCode.NOT_ADMITTED  # it has the line, and could enrol as another
    again = replace(line, secret=JoinLine.parse(desk.command("keys", "line").stdout).secret)
    takes = clinic.start("worker", ".", "--join", again.text, "--index", "1", "--name", "takes", *sets)
    wait_for(lambda: "takes" in present(desk))
    (desk.folder / "gate").write_text("")
    assert [stays.wait(), takes.wait()] == [0, 0]
    out.kill()
    broker.send_signal(signal.SIGTERM)
    _, said = broker.communicate()
    (folder,) = desk.runs()
    assert json.loads((folder / "result.json").read_text())["weights_sha256"] == wanted
    assert "speaks with a key that was revoked" in said
