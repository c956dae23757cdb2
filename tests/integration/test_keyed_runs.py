"""Whole runs whose queues other machines can reach, and have the keys of places."""

from pathlib import Path

from stageline.pipeline.program import Queue
from support.fork_server import ForkServer
from support.whole_run import WholeRun, expected, plan_in

STEPS = 12
OPEN = "queues.url=tcp://0.0.0.0:0"
FORWARD = Queue(name="forward-1", producer=0, consumer=1)


def endpoints(going: WholeRun) -> list[str]:
    """Where the queues of the workers are, once all have said so."""
    return going.wait_for(lambda: [row["endpoint"] for row in going.facts("status")["workers"] if row.get("endpoint")])


def test_a_worker_that_is_replaced_has_the_keys_of_its_place(fork_server: ForkServer, tmp_path: Path) -> None:
    going = WholeRun(fork_server, plan_in(tmp_path), OPEN, f"run.steps={STEPS}", kills=[("worker-0", 33)])
    assert going.digest() == expected(STEPS)
    assert going.end()["facts"]["restarts"] == 1
