"""`stageline relay`: it prints the address by which others use it, which stays the same, and keeps nothing."""

import os
import re
import signal
import socket
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from stageline.broker.transports.base import backend_of
from stageline.pipeline.errors import ExitCode
from stageline.workers.cli.app import run
from support.fork_server import ForkedCommand, ForkServer

TEMPORARY = "127.0.0.1:0"


@contextmanager
def started(fork_server: ForkServer, folder: Path, *words: str) -> Iterator[tuple[ForkedCommand, list[str]]]:
    """A relay, and the addresses that it prints."""
    environment = {"XDG_CONFIG_HOME": str(folder / "config"), "HOME": str(folder)}
    command = fork_server.start(["relay", "--bind", f"tcp://{TEMPORARY}", *words], folder, environment)
    with closing(command):
        try:
            lines = [command.stdout.readline() for _ in range(2)]
            yield command, [line.strip().partition("=")[2] for line in lines]
        finally:
            command.kill()


def parts(url: str) -> tuple[str, str]:
    """The key and the secret in a relay's address."""
    found = re.fullmatch(r"relay://(k1\.[\w-]{43}):([\w-]{22})@127.0.0.1:\d+", url)
    assert found is not None, url
    return found[1], found[2]


def test_its_line_works_and_is_the_same_after_each_start(fork_server: ForkServer, tmp_path: Path) -> None:
    with started(fork_server, tmp_path) as (command, [broker, queues]):
        assert broker == queues
        assert re.search(r"127\.0\.0\.1:\d+ is there", backend_of(queues).check_server(queues))
        command.send_signal(signal.SIGTERM)
        assert command.wait() == ExitCode.OK
        _, said = command.communicate()
    assert "Traceback" not in said
    with started(fork_server, tmp_path) as (_, [again, _]):
        assert parts(again) == parts(broker)
    with started(fork_server, tmp_path, "--admission", "1") as (_, [other, _]):
        assert parts(other)[0] == parts(broker)[0]
        assert parts(other)[1] != parts(broker)[1]


def test_the_host_is_the_one_that_others_use(fork_server: ForkServer, tmp_path: Path) -> None:
    with started(fork_server, tmp_path, "--as", "relay.example") as (_, [url, _]):
        assert re.search(r"@relay\.example:\d+$", url)


@pytest.mark.parametrize("address", ["ipc:///tmp/x", "tcp://desk", "tcp://127.0.0.1:7000-7009"])
def test_an_address_that_it_cannot_listen_at_is_refused(address: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["relay", "--bind", address]) == ExitCode.USAGE
    assert address in capsys.readouterr().err


@pytest.mark.parametrize("host", ["relay.example:443", "tcp://relay.example", "fe80::1", "a b"])
def test_a_host_that_gives_no_address_is_refused(host: str, capsys: pytest.CaptureFixture[str]) -> None:
    """It printed an address that no process could read."""
    assert run(["relay", "--as", host]) == ExitCode.USAGE
    assert host in capsys.readouterr().err


def test_the_process_that_has_the_port_is_named(fork_server: ForkServer, tmp_path: Path) -> None:
    environment = {"XDG_CONFIG_HOME": str(tmp_path), "HOME": str(tmp_path)}
    with closing(socket.create_server(("127.0.0.1", 0))) as taken:
        place = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        command = fork_server.start(["relay", "--bind", place], tmp_path, environment)
        with closing(command):
            _, said = command.communicate()
            assert command.returncode == ExitCode.FAILED
    assert f"pid {os.getpid()}" in said
    assert place in said
