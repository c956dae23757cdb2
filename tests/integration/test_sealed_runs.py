"""Whole runs whose queues over Redis are sealed: the same weights, also when a worker dies or the server forgets."""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from support.byte_tap import ByteTap, recorded
from support.fork_server import ForkServer
from support.redis_server import RedisServer
from support.sealed import SEALS_RUN
from support.whole_run import WholeRun, expected, plan_in

STEPS = 12


@pytest.fixture
def server() -> Iterator[RedisServer]:
    with RedisServer() as server:
        yield server


@pytest.fixture
def plan(tmp_path: Path) -> Path:
    """The tiny plan, whose workers seal their queues."""
    plan = plan_in(tmp_path)
    with plan.with_name("model.py").open("a") as model:
        model.write(SEALS_RUN)
    return plan


def headers(server: RedisServer) -> list[bytes]:
    """What the messages of the run begin with that lie at the server now."""
    with closing(server.client()) as client:
        assert client.get("stageline:{tiny}:layout") in (None, b"2 sealed")
        streams = [client.xrange(f"stageline:{{tiny}}:{name}") for name in ("forward-1", "backward-0")]
    return [fields[b"h"][:4] for entries in streams for _, fields in entries]


@pytest.mark.slow
def test_a_worker_that_is_replaced_seals_the_same_messages_anew(
    fork_server: ForkServer, server: RedisServer, plan: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "taps"
    folder.mkdir()
    with ByteTap(f"tcp://127.0.0.1:{server.port}", folder) as tap:
        url = f"redis://{tap.endpoint.removeprefix('tcp://')}/0"
        going = WholeRun(fork_server, plan, f"queues.url={url}", f"run.steps={STEPS}", kills=[("worker-0", 33)])
        going.until_checkpoint(4)
        assert set(headers(server)) <= {b"SLSE"}
        assert going.digest() == expected(STEPS)
        assert going.end()["facts"]["restarts"] == 1
    seen = b"".join(recorded(folder))
    assert b"SLSE" in seen
    assert b"SLMG" not in seen


@pytest.mark.slow
def test_a_server_that_is_emptied_gets_everything_again(
    fork_server: ForkServer, server: RedisServer, plan: Path
) -> None:
    going = WholeRun(fork_server, plan, f"queues.url={server.url}", f"run.steps={STEPS}")
    going.until_checkpoint(4)
    with closing(server.client()) as client:
        client.flushall()
    assert going.digest() == expected(STEPS)
    assert going.end()["facts"]["restarts"] == 0


@pytest.mark.slow
def test_a_run_that_is_resumed_as_a_whole_takes_nothing_of_before(
    fork_server: ForkServer, server: RedisServer, plan: Path
) -> None:
    sets = f"queues.url={server.url}", f"run.steps={STEPS}", "recovery.restarts=0"
    going = WholeRun(fork_server, plan, *sets, kills=[("worker-1", 33)])
    assert going.end()["code"] != 0
    assert set(headers(server)) == {b"SLSE"}
    resumed = WholeRun(fork_server, plan, *sets[:2], resume=True)
    assert resumed.digest() == expected(STEPS)
