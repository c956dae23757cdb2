"""Whole runs over a Redis server to which something happens meanwhile."""

import os
import re
import signal
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path
from time import monotonic, sleep

import msgspec
import pytest
import redis

from stageline.broker.codec.message import decode, encode
from support.fork_server import ForkServer
from support.redis_server import RedisServer
from support.whole_run import WholeRun, expected, plan_in
from support.workspace import Workspace, until, wait_for

STEPS = 12
Disturbance = Callable[[RedisServer], None]


@pytest.fixture
def server() -> Iterator[RedisServer]:
    with RedisServer() as server:
        yield server


def restarted(server: RedisServer) -> None:
    server.kill()
    server.start()


def away_for_a_while(server: RedisServer) -> None:
    server.kill()
    sleep(2)
    server.start()


def emptied(server: RedisServer) -> None:
    _tell(server, "FLUSHALL")


def restarted_without_its_file(server: RedisServer) -> None:
    server.kill()
    server.start(appendonly="no", appendfilename="other.aof")


def paused(server: RedisServer) -> None:
    _tell(server, "CLIENT", "PAUSE", "1500")


def frozen(server: RedisServer) -> None:
    server.freeze()
    sleep(1.5)
    server.thaw()


def cut_off_from_all(server: RedisServer) -> None:
    _tell(server, "CLIENT", "KILL", "TYPE", "normal")


@pytest.mark.slow
@pytest.mark.parametrize(
    "happens",
    [
        restarted,
        emptied,
        *(
            pytest.param(happens, marks=pytest.mark.slow)
            for happens in (frozen, away_for_a_while, restarted_without_its_file, paused, cut_off_from_all)
        ),
    ],
    ids=lambda happens: happens.__name__,
)
def test_the_run_ends_as_if_nothing_had_been_when_its_server_is(
    happens: Disturbance, fork_server: ForkServer, server: RedisServer, tmp_path: Path
) -> None:
    going = WholeRun(
        fork_server, plan_in(tmp_path), f"queues.url={server.url}", f"run.steps={STEPS}", "recovery.lease=2"
    )
    going.until_checkpoint(4)
    happens(server)
    assert going.digest() == expected(STEPS)
    assert going.end()["facts"]["restarts"] == 0  # no message is computed again, so none is late


@pytest.mark.slow
def test_a_server_that_forgot_and_a_producer_that_died_with_what_it_kept(
    fork_server: ForkServer, server: RedisServer, tmp_path: Path
) -> None:
    """Messages that neither side keeps any more are computed again, from the newest checkpoint on."""
    plan, kill = plan_in(tmp_path), ("worker-0", 33)
    going = WholeRun(fork_server, plan, *_sets(server), kills=[kill])
    going.until(lambda entry: entry.what == "killed")
    emptied(server)
    assert going.digest() == expected(STEPS)
    assert going.end()["facts"]["restarts"] == 1


@pytest.mark.slow
def test_a_server_that_begins_to_throw_keys_away_ends_the_run_by_name(
    fork_server: ForkServer, server: RedisServer, tmp_path: Path
) -> None:
    going = WholeRun(fork_server, plan_in(tmp_path), f"queues.url={server.url}", "run.steps=500")
    going.until_checkpoint(2)
    _tell(server, "CONFIG", "SET", "maxmemory-policy", "allkeys-lru")
    outcome = going.end()
    assert outcome["code"] == 1
    assert "has maxmemory-policy allkeys-lru: it would throw messages away" in outcome["reason"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "password", "why"),
    [
        ({"maxmemory_policy": "allkeys-lru"}, "", "maxmemory-policy allkeys-lru: it would throw messages away"),
        ({}, ":wrong@", "does not let this run in"),
    ],
)
def test_a_server_that_cannot_be_used_is_named_at_once(
    settings: dict[str, str], password: str, why: str, fork_server: ForkServer, tmp_path: Path
) -> None:
    """With recovery on, workers were started again and again until there were too many."""
    with RedisServer(**settings) as server:
        url = server.url.replace("redis://", f"redis://{password}")
        outcome = WholeRun(fork_server, plan_in(tmp_path), f"queues.url={url}").end()
    assert outcome["code"] == 1
    assert why in outcome["reason"]
    assert "wrong@" not in outcome["reason"]
    assert outcome["facts"]["restarts"] == 0


@pytest.mark.slow
def test_a_server_that_is_away_is_what_the_run_waits_for_by_name(
    server: RedisServer, workspace: Workspace, capsys: pytest.CaptureFixture[str]
) -> None:
    train = workspace.start("train", ".", "--set", f"queues.url={server.url}", "--set", "run.steps=100000")
    until(train.stderr, "running")
    server.kill()
    assert "what to do: start that server" in _why(workspace, capsys, server)
    assert workspace.here("status") == 0
    assert f"waits for the server of its queues: Redis at {server.url}" in capsys.readouterr().out
    for number in (signal.SIGINT, signal.SIGINT):
        train.send_signal(number)
    train.communicate()


@pytest.mark.slow
def test_a_server_that_is_not_there_yet_is_what_the_run_waits_for_by_name(
    server: RedisServer, workspace: Workspace, capsys: pytest.CaptureFixture[str]
) -> None:
    """For a minute, only "waiting for the workers to connect their queues" was said."""
    server.kill()
    train = workspace.start("train", ".", "--set", f"queues.url={server.url}")
    until(train.stderr, f"waits for the server of its queues: Redis at {server.url} cannot be reached: ")
    assert "what to do: start that server" in _why(workspace, capsys, server)
    server.start()
    _, said = train.communicate()
    assert train.returncode == 0, said


def _sets(server: RedisServer) -> tuple[str, str]:
    return f"queues.url={server.url}", f"run.steps={STEPS}"


def _why(workspace: Workspace, capsys: pytest.CaptureFixture[str], server: RedisServer) -> str:
    """Answer of `why` as soon as it names the server."""
    named = rf"waits for the server of its queues, for \d+ s now: Redis at {server.url} cannot be reached: "
    end = monotonic() + 20
    while True:
        workspace.here("why")
        said = capsys.readouterr().out
        if re.search(named, said):
            return said
        assert monotonic() < end, said
        sleep(0.2)


def _tell(server: RedisServer, *command: str) -> None:
    with closing(server.client()) as client:
        client.execute_command(*command)


@pytest.mark.parametrize("kind", ["", *(pytest.param(kind, marks=pytest.mark.slow) for kind in (":kept", ":taken"))])
def test_a_key_that_another_client_replaces_is_named_and_once_it_is_deleted_the_run_ends_as_if_nothing_had_been(
    kind: str, fork_server: ForkServer, server: RedisServer, tmp_path: Path
) -> None:
    going = WholeRun(fork_server, plan_in(tmp_path), f"queues.url={server.url}", f"run.steps={STEPS}")
    going.until_checkpoint(4)
    key = f"stageline:{{{going.facts('status')['run']}}}:forward-1{kind}"
    with closing(server.client()) as client:
        client.pipeline().delete(key).set(key, "mine").execute()
        named = f"key {key} is a string, not a stream: another client replaced it"
        going.wait_for(lambda: named in going.facts("why")["text"])
        client.delete(key)
    assert going.digest() == expected(STEPS)
    assert going.end()["facts"]["restarts"] == 0


SCRIPT = """
import sys

import torch
from stageline import Line
from torch import nn

line = Line(
    nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)),
    cut=[2],
    loss=nn.functional.mse_loss,
    optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    settings={"queues.url": sys.argv[1]},
)
with line:
    for _ in range(4):
        line.step(torch.ones(8, 4), torch.ones(8, 3))
"""


def replaced(client: redis.Redis, run: str, queue: str) -> bool:
    """Puts another stream in place of that of the run's queue in one instant; its newest message has other numbers, and
    is as well-formed. False if there was none, or a worker changed it at that moment."""
    key = f"stageline:{{{run}}}:{queue}".encode()
    with client.pipeline() as unit, suppress(redis.WatchError):
        unit.watch(key)
        entries = unit.xrange(key)
        if not entries:
            return False
        frames = [entries[-1][1][b"h"], entries[-1][1][b"d"]]
        message = decode(frames)
        other = msgspec.structs.replace(message, payload=message.payload.detach() + 1)
        unit.multi()
        unit.delete(key)
        for entry_id, fields in entries[:-1]:
            unit.xadd(key, fields, entry_id)
        header, tensor = map(bytes, encode(other))
        unit.xadd(key, {b"t": 0, b"d": tensor, b"h": header}, entries[-1][0])
        unit.execute()
        return True
    return False


@pytest.mark.slow
def test_a_stream_that_another_client_replaces_as_a_whole_ends_the_run_and_a_resumed_one_has_nothing_of_it(
    fork_server: ForkServer, server: RedisServer, tmp_path: Path
) -> None:
    """The run trained on numbers that no worker had sent, to the end."""
    plan = plan_in(tmp_path)
    going = WholeRun(fork_server, plan, f"queues.url={server.url}", "run.steps=100")
    going.until_checkpoint(2)
    consumer = going.facts("status")["workers"][1]["pid"]
    with closing(server.client()) as client, suppress(ProcessLookupError):
        while going.goes_on:  # what the consumer has taken already may be replaced unnoticed, and does no harm
            os.kill(consumer, signal.SIGSTOP)
            wait_for(lambda: replaced(client, "tiny", "forward-1") or not going.goes_on)
            os.kill(consumer, signal.SIGCONT)
    outcome = going.end()
    assert outcome["code"] == 1
    assert "forward-1" in outcome["reason"]
    assert "another client" in outcome["reason"]
    resumed = WholeRun(fork_server, plan, f"queues.url={server.url}", "run.steps=100", resume=True)
    assert resumed.digest() == expected(100)


@pytest.mark.parametrize(
    "command", ["script", *(pytest.param(each, marks=pytest.mark.slow) for each in ("worker", "plan"))]
)
def test_a_server_that_all_on_the_network_can_use_is_warned_of(workspace: Workspace, command: str) -> None:
    """An address of tcp was, and a server without password and TLS was not."""
    (workspace.folder / "script.py").write_text(SCRIPT)
    url = "redis://192.0.2.1:6379/0"  # of no machine
    started = (
        workspace.start("script", "script.py", url)
        if command == "script"
        else workspace.start(command, ".", "--set", f"queues.url={url}")
    )
    until(started.stderr, f'queues.url = "{url}" names a server on the network, without a password and without TLS')
    workspace.kill()
    wait_for(lambda: not workspace.processes())


@pytest.mark.slow
def test_a_script_that_closes_its_line_leaves_nothing_at_the_server(server: RedisServer, workspace: Workspace) -> None:
    """Its broker took the script, which had said nothing at the end, for present, and left the queues there."""
    (workspace.folder / "script.py").write_text(SCRIPT)
    script = workspace.start("script", "script.py", server.url)
    _, log = script.communicate()
    assert script.returncode == 0, log
    with closing(server.client()) as client:
        assert client.keys("*") == []
