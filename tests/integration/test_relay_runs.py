"""Whole runs through a relay: the same weights, whichever process is killed, and nothing to read on the way."""

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from functools import cache
from itertools import chain
from pathlib import Path
from socket import gethostname
from typing import Any, TypeVar

import pytest

from support import reference
from support.byte_tap import ByteTap, found, recorded, rows_of
from support.fork_server import ForkServer
from support.relayed import RUN, RelayedRun, Site, killed
from support.relays import RunningRelay
from support.whole_run import TINY, WholeRun, expected, plan_in

Test = TypeVar("Test", bound=Callable[..., None])
STEPS = 240  # which take longer than a broker's start
SHORT = 12
HOST = "10.77.0.1"


def in_turn(test: Test) -> Test:
    """Marks a test that waits for several processes in turn."""
    return pytest.mark.slow(pytest.mark.timeout(300)(test))


@in_turn
def test_a_relay_and_a_worker_are_lost(fork_server: ForkServer, tmp_path: Path) -> None:
    with ExitStack() as stack:
        first = stack.enter_context(closing(RunningRelay()))
        sets = f"queues.url={first.url}", f"run.steps={SHORT}"
        going = WholeRun(fork_server, plan_in(tmp_path), *sets, kills=[("worker-0", 33)])
        going.until_checkpoint(4)
        stack.enter_context(closing(first.restarted()))
        assert going.digest() == expected(SHORT)
        assert going.end()["facts"]["restarts"] == 1


@contextmanager
def run_of(relay: Site, desks: Sequence[Site], *others: Any) -> Iterator[RelayedRun]:
    try:
        yield RelayedRun(relay, desks, *others)
    finally:
        for site in (relay, *desks):
            site.kill()


def the_relay_is_killed(run: RelayedRun) -> None:
    killed(run.relay)
    run.relay = run.start_relay()


def the_broker_is_killed(run: RelayedRun) -> None:
    killed(run.broker)
    run.broker = run.start_broker()


def a_worker_is_killed(run: RelayedRun) -> None:
    killed(run.workers[1])
    run.workers[1] = run.start_worker(1)


HAPPENS = {5: the_relay_is_killed, 20: a_worker_is_killed, 35: the_broker_is_killed}


@in_turn
def test_nothing_of_a_run_is_readable_on_its_way(tmp_path: Path) -> None:
    plan, taps = plan_in(tmp_path), tmp_path / "taps"
    taps.mkdir()
    relay, desks = Site(tmp_path / "relay", plan), [Site(tmp_path / name, plan) for name in ("desk", "lab")]
    with ExitStack() as stack:

        @cache
        def tapped(url: str) -> str:
            before, _, port = url.rpartition(":")
            tap = stack.enter_context(ByteTap(f"tcp://127.0.0.1:{port}", taps))
            return f"{before}:{tap.endpoint.rpartition(':')[2]}"

        with run_of(relay, desks, "127.0.0.1", SHORT, tapped) as run:
            assert run.end() == expected(SHORT)
    assert sum(map(len, recorded(taps))) > 10_000
    recipe = reference.recipe(TINY, steps=SHORT)
    rows = chain.from_iterable(rows_of(recipe.batch(step)[0]) for step in range(SHORT))
    words = [RUN, "tiny", "forward-1", "backward-0", "worker-0", "1.weight", "cross_entropy", "AdamW", gethostname()]
    words += [word for word in plan.read_text().split() if len(word) > 7]
    words += [*run.line.replace("@", "#").split("#"), *re.split(r"[.:@]", run.line)]
    assert found(taps, chain(rows, [word.encode() for word in words if len(word) > 3])) == []


@contextmanager
def networks() -> Iterator[tuple[str, str, str]]:
    """Three network namespaces: a relay's, at `HOST`, and two that reach nothing else, at 10.77.1.2 and 10.77.2.2."""
    if os.geteuid():
        pytest.skip("networks can only be made by root")
    names = tuple(f"stageline-{os.getpid()}-{name}" for name in ("relay", "desk", "lab"))
    try:
        for name in names:
            _ip("netns", "add", name)
            _ip("-n", name, "link", "set", "lo", "up")
            # A machine that forwards packets, as one with Docker does, hands that on to new namespaces.
            _ip("netns", "exec", name, "sh", "-c", "echo 0 > /proc/sys/net/ipv4/ip_forward")
        _ip("-n", names[0], "address", "add", f"{HOST}/32", "dev", "lo")
        for number, name in enumerate(names[1:], start=1):
            _ip("-n", name, "link", "add", "out", "type", "veth", "peer", "name", f"to{number}", "netns", names[0])
            for place, device, host in ((name, "out", 2), (names[0], f"to{number}", 1)):
                _ip("-n", place, "address", "add", f"10.77.{number}.{host}/24", "dev", device)
                _ip("-n", place, "link", "set", device, "up")
            _ip("-n", name, "route", "add", "default", "via", f"10.77.{number}.1")
        yield names  # type: ignore[misc]
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)


def reaches(network: str, host: str) -> bool:
    """Whether a host answers a process of the network, if only that nothing listens there."""
    code = f"import socket; socket.create_connection(({host!r}, 1), timeout=1)"
    tried = subprocess.run(["ip", "netns", "exec", network, sys.executable, "-c", code], capture_output=True)
    return b"ConnectionRefusedError" in tried.stderr


def open_ports(network: str) -> list[str]:
    """The addresses at which processes of a network listen, apart from loopback, as hexadecimal numbers."""
    tables = ["ip", "netns", "exec", network, "cat", "/proc/net/tcp", "/proc/net/tcp6"]
    rows = map(str.split, subprocess.run(tables, capture_output=True, text=True, check=True).stdout.splitlines())
    return [row[1] for row in rows if row[3] == "0A" and not row[1].startswith("0100007F")]


def nothing() -> None:
    return


def trains_whoever_is_killed(relay: Site, desks: Sequence[Site], host: str, look: Callable[[], None] = nothing) -> None:
    with run_of(relay, desks, host, STEPS) as run:
        for step, happens in HAPPENS.items():
            run.until_step(step)
            look()
            happens(run)
        assert run.end() == expected(STEPS)
    assert sorted(path.name for path in relay.folder.rglob("*") if path.is_file()) == ["own.key", "relay.log"]


@in_turn
def test_relay_worker_and_broker_are_killed_and_the_weights_are_those_of_the_unsplit_model(tmp_path: Path) -> None:
    plan = plan_in(tmp_path)
    relay, *desks = (Site(tmp_path / name, plan) for name in ("relay", "desk", "lab"))
    trains_whoever_is_killed(relay, desks, "127.0.0.1")


@in_turn
def test_two_networks_that_cannot_reach_each_other_train_through_a_relay(tmp_path: Path) -> None:
    """With outbound connections alone."""
    plan = plan_in(tmp_path)
    with networks() as names:
        relay, *desks = (Site(tmp_path / name, plan, ("ip", "netns", "exec", name)) for name in names)
        assert [reaches(name, HOST) for name in names[1:]] == [True, True]
        assert [reaches(names[1], "10.77.2.2"), reaches(names[2], "10.77.1.2")] == [False, False]
        assert open_ports(names[0]) == []

        def look() -> None:
            assert [len(open_ports(name)) for name in names] == [1, 0, 0]

        trains_whoever_is_killed(relay, desks, HOST, look)
