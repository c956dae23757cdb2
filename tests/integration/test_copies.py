"""Machines are lost with their disks, and the weights are the undisturbed run's: snapshots are copied."""

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest

from support.apart import ApartRun
from support.fork_server import ForkServer
from support.redis_server import shared_server
from support.whole_run import expected
from support.workspace import until

STEPS = 40
SETS = ("recovery.copies=1", f"run.steps={STEPS}", "recovery.snapshot_every=2", "recovery.lease=2")


def redis() -> str:
    server = shared_server()
    return f"redis://127.0.0.1:{server.port}/{server.own_number()}"


@pytest.mark.parametrize(
    "url",
    [
        lambda: "tcp://127.0.0.1:0",
        redis,
        pytest.param(lambda: "shm://", marks=pytest.mark.slow),
    ],
    ids=["tcp", "redis", "shm"],
)
def test_a_worker_that_is_lost_with_its_disk_goes_on_from_the_copy_on_another(
    url: Callable[[], str], fork_server: ForkServer, tmp_path: Path, stack: ExitStack
) -> None:
    run = ApartRun(tmp_path, fork_server, stack, *SETS, f"queues.url={url()}")
    lost, stays, fresh = (run.machine(name) for name in ("lost", "stays", "fresh"))
    first, second = run.worker(lost, 0), run.worker(stays, 1)
    run.until_checkpoint(4)
    run.lose(lost, first)
    third = run.worker(fresh, 0)
    assert [second.wait(), third.wait()] == [0, 0]
    assert run.result()["weights_sha256"] == expected(STEPS)
    run.end()


@pytest.mark.slow
def test_disks_are_lost_one_after_the_other_and_the_copies_are_made_again(
    fork_server: ForkServer, tmp_path: Path, stack: ExitStack
) -> None:
    run = ApartRun(tmp_path, fork_server, stack, *SETS, "queues.url=tcp://127.0.0.1:0")
    machines = [run.machine(name) for name in "abcd"]
    workers = [run.worker(machines[index], index) for index in range(2)]
    run.until_checkpoint(4)
    run.lose(machines[0], workers[0])
    workers[0] = run.worker(machines[2], 0)
    run.until_checkpoint(run.status()["checkpoint"] + 4)
    run.lose(machines[1], workers[1])
    workers[1] = run.worker(machines[3], 1)
    assert [worker.wait() for worker in workers] == [0, 0]
    assert run.result()["weights_sha256"] == expected(STEPS)
    run.end()


@pytest.mark.slow
def test_a_run_whose_worker_and_holder_are_lost_with_their_disks_ends_with_the_name_of_the_snapshot(
    fork_server: ForkServer, tmp_path: Path, stack: ExitStack
) -> None:
    run = ApartRun(tmp_path, fork_server, stack, *SETS, "queues.url=tcp://127.0.0.1:0")
    machines = [run.machine(name) for name in "abcd"]
    workers = [run.worker(machines[index], index) for index in range(2)]
    run.until_checkpoint(4)
    for machine, worker in zip(machines, workers, strict=False):
        run.lose(machine, worker)
    others = [run.worker(machines[2 + index], index) for index in range(2)]
    reason = until(run.broker.stderr, "has failed")
    assert all(worker.wait() for worker in others)
    assert "no other worker holds a copy" in reason
    assert "checkpoints/stage-" in reason
    run.end()


@pytest.mark.slow
def test_a_run_is_resumed_as_a_whole_on_machines_of_which_one_has_an_empty_disk(
    fork_server: ForkServer, tmp_path: Path, stack: ExitStack
) -> None:
    run = ApartRun(tmp_path, fork_server, stack, *SETS, "queues.url=tcp://127.0.0.1:0")
    lost, stays, fresh = (run.machine(name) for name in ("lost", "stays", "fresh"))
    workers = run.worker(lost, 0), run.worker(stays, 1)
    run.until_checkpoint(4)
    run.lose(lost, workers[0])
    workers[1].kill()
    workers[1].wait()
    run.broker.kill()
    run.broker.wait()
    run.resume()
    again = run.worker(fresh, 0), run.worker(stays, 1)
    assert [worker.wait() for worker in again] == [0, 0]
    assert run.result()["weights_sha256"] == expected(STEPS)
    run.end()
