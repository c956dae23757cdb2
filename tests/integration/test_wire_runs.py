"""Whole runs over connections that break, are slow, lose bytes or change them."""

from pathlib import Path

import pytest

from support.fork_server import ForkServer
from support.paths import TESTS
from support.proxy import Proxy
from support.redis_server import shared_server
from support.whole_run import WholeRun, expected, plan_in
from support.wire_damage import KINDS, BadWire

STEPS = 12

THROUGH_A_PROXY = """
import sys
from pathlib import Path

from stageline.workers.process import worker

sys.path.append({tests!r})

from support.wire_damage import BadWire
from support.proxy import Proxy

def _through_a_proxy(endpoint, broker, plain=worker.reachable):
    proxy = Proxy(plain(endpoint, broker))
    BadWire(proxy, {kind!r}, lambda: (Path(__file__).parent / "fired").open("a").write("x"))
    return proxy.endpoint

worker.reachable = _through_a_proxy
"""


def quick_is(quick: str) -> list[object]:
    """All kinds; `make test` runs only this one."""
    return [kind if kind == quick else pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS]


@pytest.mark.parametrize("kind", quick_is("corrupts"))
def test_between_workers_a_bad_wire_changes_nothing(kind: str, fork_server: ForkServer, tmp_path: Path) -> None:
    plan = plan_in(tmp_path)
    with (plan.parent / "model.py").open("a") as file:
        file.write(THROUGH_A_PROXY.format(tests=str(TESTS), kind=kind))
    going = WholeRun(fork_server, plan, "queues.url=tcp://127.0.0.1:0", f"run.steps={STEPS}")
    assert going.digest() == expected(STEPS)
    assert len((plan.parent / "fired").read_text()) > 3


@pytest.mark.slow
@pytest.mark.parametrize("kind", quick_is("cuts"))
def test_to_a_redis_server_a_bad_wire_changes_nothing(kind: str, fork_server: ForkServer, tmp_path: Path) -> None:
    server, fired = shared_server(), []
    with Proxy(f"tcp://127.0.0.1:{server.port}") as proxy:
        BadWire(proxy, kind, lambda: fired.append(kind))
        url = f"redis://{proxy.endpoint.removeprefix('tcp://')}/{server.own_number()}"
        assert WholeRun(fork_server, plan_in(tmp_path), f"queues.url={url}", f"run.steps={STEPS}").digest() == expected(
            STEPS
        )
    assert len(fired) > 3
