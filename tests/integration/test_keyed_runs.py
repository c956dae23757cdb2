"""Whole runs whose queues other machines can reach: a place's keys are its own, and a stranger gets nothing."""

import socket
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from stageline.broker.keys.admission import QueueKeys
from stageline.broker.queues.ends import QueueOptions
from stageline.broker.queues.requests import CreditRequest, pack
from stageline.broker.queues.secrets import QueueSecrets
from stageline.broker.transports.sockets.zeromq_queues import ZeroMQQueues
from stageline.pipeline.addresses import parted
from stageline.pipeline.program import Queue
from support.byte_tap import ByteTap, recorded
from support.fork_server import ForkServer
from support.hostile import GREETING, frame
from support.keyed import STRANGER, Admitted
from support.redis_server import RedisServer
from support.whole_run import WholeRun, expected, plan_in

STEPS = 12
OPEN = "queues.url=tcp://0.0.0.0:0"
FORWARD = Queue(name="forward-1", producer=0, consumer=1, window=64)
KEYED = QueueSecrets(curve=QueueKeys(STRANGER, Admitted([STRANGER])))


def endpoint_of(going: WholeRun, worker: int) -> str:
    """Where its queues are, once it has said so."""
    return str(going.wait_for(lambda: going.facts("status")["workers"][worker].get("endpoint")))


def test_a_worker_that_is_replaced_has_the_keys_of_its_place(fork_server: ForkServer, tmp_path: Path) -> None:
    going = WholeRun(fork_server, plan_in(tmp_path), OPEN, f"run.steps={STEPS}", kills=[("worker-0", 33)])
    assert going.digest() == expected(STEPS)
    assert going.end()["facts"]["restarts"] == 1


@pytest.mark.slow
def test_a_stranger_at_the_port_of_a_queue_takes_nothing_and_disturbs_nothing(
    fork_server: ForkServer, tmp_path: Path
) -> None:
    """It knows the address, the key in it, the run and the incarnations; of secrets it has its own alone."""
    going = WholeRun(fork_server, plan_in(tmp_path), OPEN, "run.steps=40")
    going.until_checkpoint(2)
    keyed, run = endpoint_of(going, 0), going.facts("status")["run"]
    assert "#k1." in keyed
    wanted = CreditRequest(run, FORWARD.name, 2**40, 1, 0, 10**6, resend=True, ask=True)
    with ExitStack() as stack:
        for secrets, endpoint in ((QueueSecrets(), parted(keyed)[0]), (KEYED, keyed)):
            stranger = stack.enter_context(
                closing(ZeroMQQueues(run, 2**40, "tcp://127.0.0.1:0", QueueOptions(secrets=secrets)))
            )
            stranger.connect({FORWARD: endpoint})
            stranger.inbound(FORWARD).rewind(0)
            assert stranger.inbound(FORWARD).take(1.0) is None
        for _ in range(10):
            with socket.create_connection(("127.0.0.1", int(parted(keyed)[0].rpartition(":")[2]))) as client:
                client.sendall(GREETING + frame(pack(wanted)))
    assert going.digest() == expected(40)
    assert going.end()["facts"]["restarts"] == 0


@pytest.mark.slow
def test_nothing_of_a_model_can_be_read_at_a_server(fork_server: ForkServer, tmp_path: Path) -> None:
    """Names of queues can, sizes, and times."""
    folder = tmp_path / "taps"
    folder.mkdir()
    plan = plan_in(tmp_path)
    with RedisServer() as server, ByteTap(f"tcp://127.0.0.1:{server.port}", folder) as tap:
        url = f"redis://127.1:{tap.endpoint.rpartition(':')[2]}/0"
        going = WholeRun(fork_server, plan, f"queues.url={url}", f"run.steps={STEPS}")
        assert going.digest() == expected(STEPS)
    seen = b"".join(recorded(folder))
    assert b"forward-1" in seen
    for word in (b"float32", b"weight", b"loss", b"tensor", b"SLMG", b"worker-0", b"cross_entropy", b"model.py"):
        assert word not in seen, word
