"""An address that cannot be bound is reported with the reason; the file of a socket is removed in the end."""

import os
import socket
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import zmq

from stageline.broker.errors import EndpointTaken
from stageline.broker.transports.sockets.bind import bind, bind_path, connect, listening


@pytest.fixture
def sockets() -> Iterator[list[zmq.Socket[Any]]]:
    with zmq.Context() as context:
        found = [context.socket(zmq.ROUTER) for _ in range(2)]
        yield found
        for each in found:
            each.close(0)


def test_the_endpoint_has_the_port_that_the_system_chose(sockets: list[zmq.Socket[Any]]) -> None:
    endpoint = bind(sockets[0], "tcp://127.0.0.1:0")
    assert int(endpoint.removeprefix("tcp://127.0.0.1:")) > 0


def test_an_address_in_use_is_named(sockets: list[zmq.Socket[Any]]) -> None:
    endpoint = bind(sockets[0], "tcp://127.0.0.1:0")
    with pytest.raises(EndpointTaken, match=f"{endpoint}: it is in use by pid {os.getpid()}"):
        bind(sockets[1], endpoint)


def test_of_a_range_of_ports_the_first_free_one_is_taken(sockets: list[zmq.Socket[Any]]) -> None:
    first, last = two_ports_in_a_row()
    endpoints = [bind(each, f"tcp://127.0.0.1:{first}-{last}") for each in sockets]
    assert endpoints == [f"tcp://127.0.0.1:{first}", f"tcp://127.0.0.1:{last}"]


def test_a_range_without_a_free_port_is_named_with_who_holds_each(sockets: list[zmq.Socket[Any]]) -> None:
    first, last = two_ports_in_a_row()
    with socket.create_server(("127.0.0.1", first)), socket.create_server(("127.0.0.1", last)):
        held = f"{first} by pid {os.getpid()}, {last} by pid {os.getpid()}"
        with pytest.raises(EndpointTaken, match=f"tcp://127.0.0.1:{first}-{last}: .* in use: {held}; .* wider range"):
            bind(sockets[0], f"tcp://127.0.0.1:{first}-{last}")


def test_a_range_at_an_address_that_this_machine_lacks_is_not_said_to_be_in_use(
    sockets: list[zmq.Socket[Any]],
) -> None:
    with pytest.raises(EndpointTaken, match=r"192.0.2.1:5600-5609: this machine has no such address"):
        bind(sockets[0], "tcp://192.0.2.1:5600-5609")


def test_an_ipv6_address_carries_messages_where_the_system_has_it(sockets: list[zmq.Socket[Any]]) -> None:
    """`[::1]` was said not to be an address of this machine, since ZeroMQ has to be asked for IPv6."""
    there, arrived = _has_ipv6(), 0
    sockets[1].set(zmq.PROBE_ROUTER, 1)  # a message as soon as it is connected
    with suppress(EndpointTaken):
        connect(sockets[1], bind(sockets[0], "tcp://[::1]:0"))
        arrived = sockets[0].poll(30_000)
    assert bool(arrived) is there


def _has_ipv6() -> bool:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


def two_ports_in_a_row() -> tuple[int, int]:
    """Two free ports of 127.0.0.1, below those that the system hands out."""
    for first in range(20000 + os.getpid() % 5000, 32000, 2):
        with (
            suppress(OSError),
            socket.create_server(("127.0.0.1", first)),
            socket.create_server(("127.0.0.1", first + 1)),
        ):
            return first, first + 1
    raise AssertionError("no two ports in a row are free")


def test_a_path_that_a_process_serves_is_not_taken_away_from_it(sockets: list[zmq.Socket[Any]], tmp_path: Path) -> None:
    url = f"ipc://{tmp_path}/socket"
    bind(sockets[0], url)
    with pytest.raises(EndpointTaken, match=f"{url}: it is in use by pid {os.getpid()}"):
        bind(sockets[1], url)


def test_a_path_that_a_dead_process_left_is_taken(sockets: list[zmq.Socket[Any]], tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as left:
        left.bind(f"{tmp_path}/socket")
    assert (tmp_path / "socket").exists()
    bind(sockets[0], f"ipc://{tmp_path}/socket")


def test_a_path_too_long_for_a_socket_is_named(sockets: list[zmq.Socket[Any]], tmp_path: Path) -> None:
    with pytest.raises(EndpointTaken, match="a path may have 107 bytes at most"):
        bind(sockets[0], f"ipc://{tmp_path}/{'x' * 120}")


def test_a_folder_that_does_not_exist_is_named(sockets: list[zmq.Socket[Any]], tmp_path: Path) -> None:
    with pytest.raises(EndpointTaken, match="the folder does not exist"):
        bind(sockets[0], f"ipc://{tmp_path}/none/socket")


def test_the_file_of_a_socket_is_removed_in_the_end(sockets: list[zmq.Socket[Any]], tmp_path: Path) -> None:
    with listening(sockets[0], f"ipc://{tmp_path}/socket"):
        assert (tmp_path / "socket").exists()
    assert not (tmp_path / "socket").exists()


def test_the_file_of_another_socket_at_the_path_stays(sockets: list[zmq.Socket[Any]], tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as other:
        with listening(sockets[0], f"ipc://{tmp_path}/socket"):
            (tmp_path / "socket").unlink()
            other.bind(f"{tmp_path}/socket")
        assert (tmp_path / "socket").exists()


def test_the_path_of_another_kind_of_socket_or_of_a_process_that_hangs_is_not_taken_away(tmp_path: Path) -> None:
    url = f"shm://{tmp_path}/socket"
    for kind, backlog in ((socket.SOCK_STREAM, 8), (socket.SOCK_SEQPACKET, 0)):
        with socket.socket(socket.AF_UNIX, kind) as served, socket.socket(socket.AF_UNIX, kind) as waiting:
            served.bind(str(tmp_path / "socket"))
            served.listen(backlog)
            waiting.connect(str(tmp_path / "socket"))  # with a backlog of 0 there is room for no other
            mine = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with mine, pytest.raises(EndpointTaken, match=f"{url}: it is in use"):
                bind_path(mine, url)
            assert (tmp_path / "socket").is_socket()
        (tmp_path / "socket").unlink()
