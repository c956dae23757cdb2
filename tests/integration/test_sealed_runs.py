"""Whole runs whose queues over Redis are sealed: the same weights, also when a worker dies or the server forgets."""

import shutil
from contextlib import closing
from pathlib import Path

import pytest

from support.byte_tap import ByteTap, recorded
from support.fork_server import ForkServer
from support.redis_server import RedisServer
from support.whole_run import WholeRun, expected, plan_in

STEPS = 12


@pytest.fixture
def plan(tmp_path: Path) -> Path:
    return plan_in(tmp_path)


def elsewhere(endpoint: str) -> str:
    """The same address by a name of this machine that does not tell that it is this machine."""
    return f"redis://127.1:{endpoint.rpartition(':')[2]}/0"


def at(redis: RedisServer) -> str:
    return elsewhere(redis.url.removesuffix("/0"))


def headers(redis: RedisServer) -> list[bytes]:
    """First bytes of the run's messages that lie at the server now."""
    with closing(redis.client()) as client:
        assert client.get("stageline:{tiny}:layout") in (None, b"2 sealed")
        streams = [client.xrange(f"stageline:{{tiny}}:{name}") for name in ("forward-1", "backward-0")]
    return [fields[b"h"][:4] for entries in streams for _, fields in entries]


@pytest.mark.slow
def test_a_worker_that_is_replaced_seals_the_same_messages_anew(
    fork_server: ForkServer, redis: RedisServer, plan: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "taps"
    folder.mkdir()
    with ByteTap(f"tcp://127.0.0.1:{redis.port}", folder) as tap:
        going = WholeRun(
            fork_server, plan, f"queues.url={elsewhere(tap.endpoint)}", f"run.steps={STEPS}", kills=[("worker-0", 33)]
        )
        going.until_checkpoint(4)
        assert set(headers(redis)) <= {b"SLSE"}
        assert going.digest() == expected(STEPS)
        assert going.end()["facts"]["restarts"] == 1
    seen = b"".join(recorded(folder))
    assert b"SLSE" in seen
    assert b"SLMG" not in seen


@pytest.mark.slow
def test_a_server_that_is_emptied_gets_everything_again(
    fork_server: ForkServer, redis: RedisServer, plan: Path
) -> None:
    going = WholeRun(fork_server, plan, f"queues.url={at(redis)}", f"run.steps={STEPS}")
    going.until_checkpoint(4)
    with closing(redis.client()) as client:
        client.flushall()
    assert going.digest() == expected(STEPS)
    assert going.end()["facts"]["restarts"] == 0


@pytest.mark.slow
def test_a_run_whose_messages_are_padded_has_the_same_weights(
    fork_server: ForkServer, redis: RedisServer, plan: Path
) -> None:
    sets = f"queues.url={at(redis)}", "queues.padding=padme", f"run.steps={STEPS}"
    assert WholeRun(fork_server, plan, *sets).digest() == expected(STEPS)


@pytest.mark.slow
def test_a_run_that_is_resumed_as_a_whole_takes_nothing_of_before(
    fork_server: ForkServer, redis: RedisServer, plan: Path
) -> None:
    sets = f"queues.url={at(redis)}", f"run.steps={STEPS}", "recovery.restarts=0"
    going = WholeRun(fork_server, plan, *sets, kills=[("worker-1", 33)])
    assert going.end()["code"] != 0
    assert set(headers(redis)) == {b"SLSE"}
    resumed = WholeRun(fork_server, plan, *sets[:2], resume=True)
    assert resumed.digest() == expected(STEPS)


@pytest.mark.slow
def test_a_server_that_is_started_again_without_its_volume_gets_everything_again(
    fork_server: ForkServer, redis: RedisServer, plan: Path
) -> None:
    going = WholeRun(fork_server, plan, f"queues.url={at(redis)}", f"run.steps={STEPS}", kills=[("worker-1", 40)])
    going.until_checkpoint(4)
    redis.kill()
    redis.start(appendonly="no", appendfilename="other.aof")
    assert going.digest() == expected(STEPS)
    assert going.end()["facts"]["restarts"] == 1


@pytest.mark.slow
def test_a_run_of_a_name_that_was_used_before_takes_nothing_of_that_one(
    fork_server: ForkServer, redis: RedisServer, plan: Path, tmp_path: Path
) -> None:
    """The first left its messages with the server, and its folder is gone, and with it the broker's records."""
    going = WholeRun(fork_server, plan, f"queues.url={at(redis)}", f"run.steps={STEPS}")
    going.until_checkpoint(4)
    going.stop(at_step_end=False)
    going.end()
    assert set(headers(redis)) == {b"SLSE"}
    shutil.rmtree(tmp_path / "runs")
    assert WholeRun(fork_server, plan, f"queues.url={at(redis)}", f"run.steps={STEPS}").digest() == expected(STEPS)
