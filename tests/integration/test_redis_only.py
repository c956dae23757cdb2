"""Runs whose processes reach nothing but a Redis server: messages, reports and the broker's records go through it."""

import json
import os
import signal
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import pytest

from stageline.workers.control.client import BrokerUnreachable, Client
from support.redis_server import RedisServer
from support.whole_run import expected, plan_in
from support.workspace import Command, Workspace

STEPS = 32
PATIENCE = 100.0  # seconds in which anything that is waited for has happened, also where much else runs
RUN = "together"


class RedisParty:
    """A broker and two workers, started one by one."""

    def __init__(self, workspace: Workspace, plan: Path, server: RedisServer) -> None:
        self.server = server
        self._workspace = workspace
        self._plan = str(plan)
        self.url = f"{server.url}#tiny"
        self._settings = {
            "STAGELINE_BROKER__URL": self.url,
            "STAGELINE_BROKER__STORE": server.url,
            "STAGELINE_QUEUES__URL": server.url,
            "STAGELINE_RUN__STEPS": str(STEPS),
            "STAGELINE_RECOVERY__LEASE": "5s",
        }
        self.broker = self.start_broker()
        self.workers = [self.start_worker(index) for index in range(2)]

    def start_broker(self) -> Command:
        return self._workspace.start("broker", self._plan, "--run", RUN, **self._settings)

    def start_worker(self, index: int) -> Command:
        return self._workspace.start("worker", self._plan, "--index", str(index), "--patience", "60", **self._settings)

    def until_step(self, step: int) -> None:
        until = monotonic() + PATIENCE
        while self._finished_steps() < step:
            assert monotonic() < until, "the run does not go on"
            left = [process for process in (self.broker, *self.workers) if process.poll() is not None]
            assert not left, [process.communicate()[1] for process in left]
            sleep(0.1)

    def until_over(self) -> None:
        until = monotonic() + PATIENCE
        while (status := self._status()) is None or status["phase"] != "finished":
            assert monotonic() < until, "the run does not end"
            sleep(0.1)

    def until_answered(self) -> None:
        until = monotonic() + PATIENCE
        while self._status() is None:
            assert monotonic() < until, "the broker does not answer"
            sleep(0.1)

    def end(self) -> str:
        """The digest, once all processes have exited."""
        for worker in self.workers:
            _, said = worker.communicate()
            assert worker.returncode == 0, said
        self.broker.send_signal(signal.SIGTERM)  # it would stay for a while, to answer how the run ended
        _, said = self.broker.communicate()
        assert self.broker.returncode == 0, said
        assert "the queues stay at the server" not in said
        result = json.loads((Path(self._workspace.folder) / "runs" / RUN / "result.json").read_text())
        return str(result["weights_sha256"])

    def _finished_steps(self) -> int:
        status = self._status()
        return 0 if status is None else int(status["finished_floor"])

    def _status(self) -> dict[str, Any] | None:
        """Answer of the broker; None without one.

        Asked from here: starting a command for each look takes as long as the run does.
        """
        with Client(self.url) as client:
            try:
                return client.ask("status")
            except BrokerUnreachable:
                return None


def nothing_happens(party: RedisParty) -> None:
    return


def the_broker_is_killed(party: RedisParty) -> None:
    _kill(party.broker)
    party.broker = party.start_broker()
    party.until_answered()  # by the next one: the run may be over before that listens


def the_broker_is_killed_at_the_end(party: RedisParty) -> None:
    """The next one has never heard of the workers, which have left."""
    party.until_over()
    for worker in party.workers:
        worker.wait()
    _kill(party.broker)
    party.broker = party.start_broker()
    party.until_answered()


def a_worker_is_killed(party: RedisParty) -> None:
    _kill(party.workers[1])
    party.workers[1] = party.start_worker(1)


def everyone_is_killed(party: RedisParty) -> None:
    for process in (party.broker, *party.workers):
        _kill(process)
    party.broker = party.start_broker()
    party.workers = [party.start_worker(index) for index in range(2)]


def the_server_is_away(party: RedisParty) -> None:
    """For longer than a broker has its place without a word."""
    party.server.kill()
    sleep(5)
    party.server.start()


def the_server_is_full(party: RedisParty) -> None:
    with closing(party.server.client()) as client:
        client.config_set("maxmemory", 1)
        sleep(5)
        client.config_set("maxmemory", 0)


@pytest.mark.timeout(300)  # it waits for several processes in turn
@pytest.mark.parametrize(
    "happens",
    [
        pytest.param(nothing_happens, marks=pytest.mark.slow),
        the_broker_is_killed,
        pytest.param(the_broker_is_killed_at_the_end, marks=pytest.mark.slow),
        pytest.param(a_worker_is_killed, marks=pytest.mark.slow),
        pytest.param(everyone_is_killed, marks=pytest.mark.slow),
        pytest.param(the_server_is_away, marks=pytest.mark.slow),
        pytest.param(the_server_is_full, marks=pytest.mark.slow),
    ],
    ids=lambda happens: happens.__name__,
)
def test_the_weights_are_those_of_the_unsplit_model_when(
    happens: Callable[[RedisParty], None], redis: RedisServer, workspace: Workspace, tmp_path: Path
) -> None:
    party = RedisParty(workspace, plan_in(tmp_path), redis)
    party.until_step(3)
    happens(party)
    assert party.end() == expected(STEPS)
    with closing(redis.client()) as client:
        lasting = [key for key in client.keys("*") if client.pttl(key) == -1]  # -2: one has expired meanwhile
        assert [key for key in lasting if b":store:" not in key] == []  # its queues are gone


def _kill(process: Command) -> None:
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
