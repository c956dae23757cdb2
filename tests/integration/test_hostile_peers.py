"""Strangers who reach the ports of a run: it ends as if they had not been there, within a bound of memory, and its logs
name what was refused."""

import resource
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from support.hostile import (
    GREETING,
    MORE,
    READY,
    HostileClient,
    endless_multipart,
    frame,
    head_of_frame,
    idle_connections,
    peak_memory,
)
from support.run_under_attack import RunUnderAttack, undisturbed_digest
from support.workspace import Workspace

BOUND = 100 * 2**20  # bytes that a process may grow by under attack: docs/reference/limits.md
DESCRIPTORS = 512  # of a process that idle connections are made to

Attack = Callable[[str], None]


def endless_message(url: str) -> None:
    assert endless_multipart(url, most=2**31) < 2**31, "it was allowed"


def endless_messages_at_once(url: str) -> None:
    with ExitStack() as stack:
        clients = [stack.enter_context(HostileClient(url)) for _ in range(8)]
        data = 64 * frame(4096 * b"x", MORE)
        for _ in range(2**13):
            clients = [client for client in clients if client.send(data)]
    assert not clients, "they were allowed"


def large_messages(url: str) -> None:
    with HostileClient(url) as client:
        megabyte = 2**20 * b"x"
        for _ in range(20):
            if not client.send(head_of_frame(2**26)) or client.flood(megabyte, most=2**26) < 2**26:
                return
    raise AssertionError("they were allowed")


def half_a_handshake(url: str) -> None:
    with HostileClient(url, shaken=False) as client:
        client.send(GREETING[:33])
        client.wait_until_closed()


def half_a_frame(url: str) -> None:
    with HostileClient(url) as client:
        client.send(head_of_frame(1000) + b"x")
        client.wait_until_closed()


def garbage(url: str) -> None:
    for said in (b"GET / HTTP/1.1\r\n\r\n", 300 * b"\xff", 200 * b"\0", GREETING + READY + 500 * b"\x07"):
        with HostileClient(url, shaken=False) as client:
            client.send(said)
            client.wait_until_closed()


def small_garbage(url: str) -> None:
    with HostileClient(url) as client:
        assert client.flood(frame(b"garbage"), most=2**24) < 2**24, "it was allowed"


def many_idle_connections(url: str, count: int = DESCRIPTORS + 100) -> None:
    with ExitStack() as stack:
        idle_connections(url, count, stack)


def thousands_of_idle_connections(url: str) -> None:
    many_idle_connections(url, 3000)


QUICK = [endless_message, large_messages, half_a_handshake, half_a_frame, garbage, small_garbage]
REASONS = {
    endless_message: "may come before a genuine message",
    endless_messages_at_once: "may come before a genuine message",
    large_messages: "a connection was closed",
    garbage: "it ended, or was not of the protocol, and has brought no message",
    half_a_handshake: "a connection was closed",
    half_a_frame: "no genuine message came in 5 s",
    small_garbage: "may come before a genuine",
    many_idle_connections: "have brought no genuine message",
    thousands_of_idle_connections: "have brought no genuine message",
}


def withstands(workspace: Workspace, run: RunUnderAttack, attacks: Iterator[tuple[Attack, str]]) -> dict[str, str]:
    """Checks the run's memory during the attacks, and its end; what its processes have logged."""
    with peak_memory(run.pids) as peaks:
        run.status()
        before = dict(peaks)
        for attack, url in attacks:
            attack(url)
        run.status()
    digest, logs = run.end()
    assert digest == undisturbed_digest(workspace)
    for name, process in run.processes.items():
        assert peaks[process.pid] - before[process.pid] < BOUND, name
    return logs


def test_a_run_ends_as_if_no_stranger_had_been_at_its_ports(workspace: Workspace) -> None:
    attacked = RunUnderAttack(workspace)
    urls = [attacked.broker_url, attacked.worker_urls[0]]
    logs = withstands(workspace, attacked, ((attack, url) for attack in QUICK[:2] for url in urls))
    for name in ("broker", "worker 0"):
        assert REASONS[endless_message] in logs[name], logs[name]


@pytest.mark.slow
def test_idle_connections_take_no_process_its_descriptors(workspace: Workspace) -> None:
    attacked = RunUnderAttack(workspace)
    pids = {attacked.broker_url: attacked.broker.pid, attacked.worker_urls[0]: attacked.workers[0].pid}
    for pid in pids.values():
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (DESCRIPTORS, DESCRIPTORS))
    logs = withstands(workspace, attacked, ((many_idle_connections, url) for url in pids))
    for name in ("broker", "worker 0"):
        assert REASONS[many_idle_connections] in logs[name], logs[name]


@pytest.mark.parametrize(
    ("attack", "at"),
    [  # one guard stands at both: each attack is made on one of them in `make test-all`
        pytest.param(attack, at, marks=[pytest.mark.sweep, pytest.mark.slow][number % 2 == place])
        for number, attack in enumerate([*QUICK, endless_messages_at_once, thousands_of_idle_connections])
        for place, at in enumerate(["broker", "worker 0"])
    ],
)
def test_no_attack_of_a_stranger_changes_a_run(attack: Attack, at: str, workspace: Workspace) -> None:
    attacked = RunUnderAttack(workspace)
    url = attacked.broker_url if at == "broker" else attacked.worker_urls[0]
    logs = withstands(workspace, attacked, iter([(attack, url)]))
    assert REASONS[attack] in logs[at], logs[at]
