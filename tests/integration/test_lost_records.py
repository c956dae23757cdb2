"""The broker is killed and its records are deleted: the workers go on, and the run ends as if nothing had been."""

import json
from pathlib import Path
from time import sleep

import pytest

from support.redis_server import RedisServer
from support.workspace import Workspace, free_port, until

SETS = (
    "--set", "run.steps=600", "--set", "run.log_every=100", "--set", "recovery.restarts=3",
    "--set", "recovery.snapshot_every=50", "--set", "recovery.lease=1s",
)  # fmt: skip
RUN = "lost"


@pytest.mark.slow
@pytest.mark.parametrize("queues", ["shm", "tcp", "redis"])
def test_workers_go_on_under_a_broker_that_has_lost_its_records(
    queues: str, workspace: Workspace, tmp_path: Path, redis: RedisServer
):
    """They get other keys of their places while they work, and so does one that takes the place of another."""
    urls = {"shm": "shm://", "tcp": "tcp://0.0.0.0:0", "redis": f"redis://127.1:{redis.port}/0"}
    sets = (*SETS, "--set", f"queues.url={urls[queues]}")
    undisturbed = json.loads(workspace.command("train", ".", "--json", *SETS).stdout.splitlines()[-1])
    url = f"tcp://127.0.0.1:{free_port()}"
    broker = ("broker", ".", "--bind", url, "--run", RUN, "--lifeline", "2", *sets)  # stderr, which this process reads
    folder = tmp_path / "runs" / RUN
    first = workspace.start(*broker)
    until(first.stderr, "broker at")
    workers = [workspace.start("worker", ".", "--broker", url, "--index", str(index), *sets) for index in (0, 1)]
    while not list(folder.glob("checkpoints/stage-*/step-*")):
        assert [worker.poll() for worker in workers] == [None, None]
        sleep(0.01)
    first.kill()
    first.wait()
    for file in folder.glob("broker.sqlite*"):
        file.unlink()
    second = workspace.start(*broker)
    until(second.stderr, "which are lost or stale")
    until(second.stderr, "2 workers keep running")
    workers[1].kill()
    workers.append(workspace.start("worker", ".", "--broker", url, "--index", "1", *sets))
    assert [worker.wait() for worker in workers] == [0, -9, 0]
    assert second.wait() == 0
    found = json.loads((folder / "result.json").read_text())
    assert {key: found[key] for key in ("weights_sha256", "losses")} == {
        key: undisturbed[key] for key in ("weights_sha256", "losses")
    }
