"""Trains examples/digits on this machine, in containers, and in containers of which a stage's or the broker's is killed
on the way, and compares the weights: `make docker-test`.

It needs a Docker engine, and BASE_IMAGE where python:3.11-slim cannot be fetched. The images stay, so that the next
time takes less; containers, networks and volumes do not.
"""

import json
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from os import getpid
from pathlib import Path
from time import monotonic, sleep

from containers import STAGES, Containers, Facts, Failed, build, call

PLAN = "examples/digits"
VICTIM = "stage-1"  # it has a neighbour on either side
KILLED_AFTER = 20  # steps, of 460
PATIENCE = 600.0  # seconds that one run may take


def main() -> None:
    """Prints a row for each run; raises `Failed` if the weights are not the same, or the kill has not hit."""
    build()
    print(f"{'':28} {'accuracy':>8} {'restarts':>8}  weights_sha256")
    digests = {
        shown("processes on this machine", trained_here()),
        shown("containers", trained_in_containers()),
        shown(f"containers, {VICTIM} killed", trained_in_containers(killed=VICTIM)),
        shown("containers, broker killed", trained_in_containers(killed="broker")),
    }
    if len(digests) > 1:
        raise Failed("the weights differ. Compare what `stageline doctor` says here and in a container")
    print("the weights are the same, to the bit")


def shown(what: str, result: Facts) -> str:
    """Prints a result; returns the digest of its weights."""
    digest = str(result["weights_sha256"])
    print(f"{what:28} {result['metrics']['accuracy']:8.4f} {result['restarts']:8}  {digest}", flush=True)
    return digest


def trained_here() -> Facts:
    """The result of `stageline train` on this machine."""
    stageline = str(Path(sys.executable).with_name("stageline"))
    with tempfile.TemporaryDirectory(prefix="stageline-docker-test-") as runs:
        result: Facts = json.loads(call(stageline, "train", PLAN, "--json", "--set", f"run.dir={runs}"))
    return result


def trained_in_containers(killed: str | None = None) -> Facts:
    """The result of the same run in containers; that of `killed` loses its process on the way."""
    with started() as containers:
        check_isolation(containers)
        check_secrets(containers)
        if killed is not None:
            kill(containers, killed)
        wait_until(containers, lambda status: status["phase"] == "finished")
        check_ends(containers, killed)
        return containers.result()


def kill(containers: Containers, victim: str) -> None:
    """Some steps after the beginning. If it is the broker, no worker may lose its place for it."""
    before = wait_until(containers, lambda status: status["finished_floor"] >= KILLED_AFTER)
    containers.kill(victim)
    if victim == "broker":
        after = wait_until(containers, lambda status: status["finished_floor"] > before["finished_floor"])
        if lives(after) != lives(before):
            raise Failed(f"the broker was killed, and stages began again: {lives(before)}, {lives(after)}")


def lives(status: Facts) -> list[int]:
    """Incarnation of each worker, which tells it from those that had its place before."""
    return [worker.get("incarnation", 0) for worker in status["workers"]]


@contextmanager
def started() -> Iterator[Containers]:
    """Containers at work, removed at the end; their last words are shown if something goes wrong."""
    with tempfile.TemporaryDirectory(prefix="stageline-secrets-") as secrets:
        containers = Containers(f"stageline-test-{getpid()}", Path(secrets))
        try:
            containers.up()
            yield containers
        except BaseException:
            containers.show_logs()
            raise
        finally:
            containers.down()


def check_isolation(containers: Containers) -> None:
    """A stage reaches Redis, and neither another stage nor the broker."""
    seen = containers.sees("stage-0", "redis:6379")
    if seen != "open":
        raise Failed(f"to stage-0, redis:6379 is {seen}")
    for other in (*STAGES[1:], "broker"):
        seen = containers.sees("stage-0", f"{containers.address(other)}:5600")
        if seen != "away":
            raise Failed(f"to stage-0, {other} is {seen}; it should be out of reach")


def check_secrets(containers: Containers) -> None:
    """Stages are known by keys of their own; none has the broker's, and their broker is no insecure one."""
    keys = wait_until(containers, lambda status: status["keys"] is not None)["keys"]
    if keys["insecure"]:
        raise Failed("the broker has no keys")
    for stage in STAGES:
        if containers.has(stage, "/run/secrets/key") or not containers.has(stage, "/run/secrets/line"):
            raise Failed(f"{stage} has other secrets than its line")


def check_ends(containers: Containers, killed: str | None) -> None:
    """All have ended well, and the one that was killed, no other, was started again."""
    if any(containers.ends().values()):
        raise Failed(f"the run has finished, but exit statuses are {containers.ends()}")
    for service in (*STAGES, "broker"):
        restarts = containers.restarts(service)
        if (restarts > 0) != (service == killed):
            raise Failed(f"the engine has started {service} again {restarts} times")


def wait_until(containers: Containers, reached: Callable[[Facts], bool]) -> Facts:
    """Asks the broker once a second; its answer. Raises `Failed` if the run fails, or takes too long."""
    deadline = monotonic() + PATIENCE
    while True:
        status = containers.status()
        if status is not None and reached(status):
            return status
        if status is not None and status["phase"] in ("failed", "finished"):
            raise Failed(f"the run has {status['phase']} too early: {status['reason']}")
        if monotonic() > deadline:
            raise Failed(f"not done after {PATIENCE:g} s: {status}")
        sleep(1.0)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that it cleans up then too
    try:
        main()
    except Failed as failed:
        sys.exit(f"docker-test: {failed}")
