"""A run whose processes have a user each at the Redis server, by the list that `stageline keys acl` prints."""

import signal
from contextlib import closing
from pathlib import Path

import pytest

from support.redis_server import RedisServer
from support.whole_run import expected, plan_in
from support.workspace import Workspace

STEPS = 6


def places(url: str) -> dict[str, str]:
    return {"QUEUES__URL": url, "BROKER__URL": f"{url}#desk", "BROKER__STORE": url}


def settings(redis: RedisServer, user: str) -> dict[str, str]:
    url = redis.url.replace("://", f"://stageline-{user}:PASSWORD-OF-stageline-{user}@")
    return {f"STAGELINE_{name}": value for name, value in places(url).items()} | {"STAGELINE_RUN__STEPS": str(STEPS)}


@pytest.mark.slow
def test_users_of_the_printed_list_train_together(redis: RedisServer, workspace: Workspace, tmp_path: Path) -> None:
    plan = str(plan_in(tmp_path))
    sets = [
        word
        for name, url in places(redis.url).items()
        for word in ("--set", f"{name.replace('__', '.').lower()}={url}")
    ]
    printed = workspace.command("keys", "acl", plan, "--run", "together", *sets)
    assert printed.returncode == 0, printed.stderr
    with closing(redis.client()) as client:
        for line in printed.stdout.splitlines():
            client.execute_command(*line.split())
        client.execute_command("ACL", "SETUSER", "default", "off")
        broker = workspace.start("broker", plan, "--run", "together", **settings(redis, "broker"))
        workers = [workspace.start("worker", plan, **settings(redis, f"worker-{index}")) for index in range(2)]
        for worker in workers:
            said = worker.communicate()[1]
            assert worker.returncode == 0, said
        broker.send_signal(signal.SIGTERM)  # it would stay for a while, to answer how the run ended
        said = broker.communicate()[1]
        assert expected(STEPS) in said
        assert "the queues stay at the server" not in said
        refused = [entry for entry in client.execute_command("ACL", "LOG") if entry]
        assert refused == []
