"""Opening and binding of sockets, and the users at their other ends.

An error names the process that holds an address. Of a range of ports the first free one is taken. The file of an ipc
socket is removed in the end.
"""

import errno
import os
import re
import socket as sockets
import stat
import struct
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from time import monotonic, sleep
from typing import Any

import psutil
import zmq

from stageline.broker.errors import EndpointTaken

_REASONS = {
    errno.EADDRINUSE: "it is in use{by}; stop that process, or listen at another port (0 takes any that is free)",
    errno.EADDRNOTAVAIL: "this machine has no such address; use one of its own, or 127.0.0.1 for this machine alone",
    errno.ENODEV: "this machine has no such address; use one of its own, or 127.0.0.1 for this machine alone",
    errno.EACCES: "this user may not; use a port from 1024 on, or a folder that is yours",
    errno.ENAMETOOLONG: f"a path may have {zmq.IPC_PATH_MAX_LEN} bytes at most; use a shorter one, such as in /tmp",
    errno.ENOENT: "the folder does not exist; make it first",
}
_RANGE = re.compile(r"tcp://.*:(\d+)-(\d+)")
_MOST = 8  # ports that are named one by one
_LEAVING = 5.0  # seconds in which a socket has left its address
_CREDENTIALS = struct.Struct("3i")  # pid, user, group
_SERVED = {errno.EAGAIN, errno.EPROTOTYPE}  # its process accepts none now, or listens with another kind of socket


def open_socket(context: "zmq.Context[Any]", kind: int, options: Mapping[int, int | bytes]) -> "zmq.Socket[Any]":
    """Return a ZeroMQ socket with these options; no socket is left open if one of them is refused.

    Args:
        context: Context of the socket.
        kind: Type of the socket, such as `zmq.ROUTER`.
        options: Values by option, such as `zmq.LINGER`.
    """
    socket: zmq.Socket[Any] = context.socket(kind)
    try:
        for option, value in options.items():
            socket.set(option, value)
    except BaseException:
        socket.close()
        raise
    return socket


def bind(socket: zmq.Socket[Any], url: str) -> str:
    """Bind `socket` to `url`, or to the first free port if `url` has a range, and return the endpoint to connect to.

    Raises `EndpointTaken`, naming the processes that hold the ports of `url` where the system shows them.
    """
    if url.startswith("ipc://"):
        _refuse_served_path(url)  # ZeroMQ would silently take the path away from the process that serves it
    ports = _ports(url)
    _allow_ipv6(socket, url)
    refused = _bind_first(socket, [f"{url.rpartition(':')[0]}:{port}" for port in ports] or [url])
    if refused is not None:
        raise taken(refused, url, ports) from refused
    if _socket_file(url) is not None:
        os.chmod(url.removeprefix("ipc://"), 0o600)  # to connect is to write to the file
    return socket.get_string(zmq.LAST_ENDPOINT)


def bind_again(socket: zmq.Socket[Any], address: str) -> str:
    """Bind `socket` to an address that it has just left: ZeroMQ gives it up a moment later, in a thread of its own.

    Raises `EndpointTaken`.
    """
    until = monotonic() + _LEAVING
    while True:
        try:
            return bind(socket, address)
        except EndpointTaken:
            if monotonic() >= until:
                raise
            sleep(_LEAVING / 1000)


def connect(socket: zmq.Socket[Any], url: str) -> None:
    """Connect `socket` to `url`."""
    _allow_ipv6(socket, url)
    socket.connect(url)


def _allow_ipv6(socket: zmq.Socket[Any], url: str) -> None:
    """Let `socket` use the IPv6 address that `url` has in brackets; with others, names and `*` mean IPv4 addresses."""
    socket.set(zmq.IPV6, int("[" in url))


def _bind_first(socket: zmq.Socket[Any], urls: Iterable[str]) -> zmq.ZMQError | None:
    """Bind `socket` to the first of `urls` that is not in use; return why none of them can be bound, None if one is."""
    refused = None
    for url in urls:
        try:
            socket.bind(url)
            return None
        except zmq.ZMQError as error:
            refused = error
            if error.errno != errno.EADDRINUSE:
                break
    return refused


def _ports(url: str) -> Sequence[int]:
    """Return the ports of the range in `url`, none if `url` has no range."""
    found = _RANGE.fullmatch(url)
    return range(int(found[1]), int(found[2]) + 1) if found else ()


def taken(refused: zmq.ZMQError | OSError, url: str, ports: Sequence[int] = ()) -> EndpointTaken:
    """Return the error that names the processes which hold the ports of `url`, where the system shows them.

    Args:
        refused: Error of the system.
        url: Address that could not be bound.
        ports: Ports of the range in the address, if it has one.
    """
    return EndpointTaken(f"cannot listen at {url}: {_reason(refused, url, ports)}")


def _reason(refused: zmq.ZMQError | OSError, url: str, ports: Sequence[int]) -> str:
    if ports and refused.errno == errno.EADDRINUSE:
        held = _held(ports)
        return f"all its ports are in use: {held}; stop one of these processes, or give a wider range"
    owner = None if ports else _owners().get(_port(url))
    return _REASONS.get(refused.errno or 0, str(refused)).format(by=_by(owner))


def _held(ports: Sequence[int]) -> str:
    owners = _owners()
    more = f", and {len(ports) - _MOST} more" if len(ports) > _MOST else ""
    return ", ".join(f"{port}{_by(owners.get(port))}" for port in ports[:_MOST]) + more


def bind_path(socket: sockets.socket, url: str) -> None:
    """Bind a Unix socket to the path of `url`, in place of one that a dead process has left behind.

    Raises `EndpointTaken`, naming the process that holds the path where the system shows it.
    """
    path = url.partition("://")[2]
    _refuse_served_path(url, socket.type)
    with suppress(FileNotFoundError):
        if stat.S_ISSOCK(os.stat(path).st_mode):
            os.unlink(path)
    try:
        socket.bind(path)
        os.chmod(path, 0o600)  # to connect is to write to the file
    except OSError as error:
        reason = _REASONS.get(error.errno or errno.ENAMETOOLONG, str(error))  # that one has no number: it is Python's
        raise EndpointTaken(f"cannot listen at {url}: {reason.format(by='')}") from error


@contextmanager
def listening(socket: zmq.Socket[Any], url: str) -> Iterator[str]:
    """Return a context in which `socket` is bound to `url`, as by `bind`; it gives the endpoint to connect to.

    In the end the socket's file is removed, which ZeroMQ leaves behind, unless another socket has the path by then.
    """
    endpoint = bind(socket, url)
    mine = _socket_file(url)
    try:
        yield endpoint
    finally:
        # As long as the socket listens, which it still does, no other broker is given its path.
        if mine is not None and _socket_file(url) == mine:
            with suppress(OSError):  # a file that stays does no harm
                os.unlink(url.removeprefix("ipc://"))


def _socket_file(url: str) -> tuple[int, int] | None:
    """Return device and inode of the file at the path of `url`, if it is a socket's."""
    try:
        found = os.stat(url.removeprefix("ipc://"))
    except OSError:
        return None
    return (found.st_dev, found.st_ino) if url.startswith("ipc://") and stat.S_ISSOCK(found.st_mode) else None


def _refuse_served_path(url: str, kind: int = sockets.SOCK_STREAM) -> None:
    path = re.sub("^@", "\\0", url.partition("://")[2])  # Linux's abstract names
    with sockets.socket(sockets.AF_UNIX, kind) as probe:
        probe.setblocking(False)  # a process that hangs accepts nothing
        try:
            probe.connect(path)
        except OSError as error:
            if error.errno not in _SERVED:  # nothing there, left behind by a dead process, or no path for a socket
                return
        pid = None
        if hasattr(sockets, "SO_PEERCRED"):  # on Linux; 0 if it is not connected
            pid = int.from_bytes(probe.getsockopt(sockets.SOL_SOCKET, sockets.SO_PEERCRED, 4), sys.byteorder)
    raise EndpointTaken(f"cannot listen at {url}: it is in use{_by(pid)}; stop that process, or use another path")


def _by(pid: int | None) -> str:
    return f" by pid {pid}" if pid else ""


def _port(url: str) -> int:
    port = url.rpartition(":")[2]
    return int(port) if url.startswith("tcp://") and port.isdigit() else 0


def _owners() -> Mapping[int, int]:
    """Return the processes that listen at TCP ports of this machine, by port, as far as this user may know them."""
    try:
        there = psutil.net_connections(kind="tcp")
    except psutil.Error:  # macOS shows them to root alone
        return {}
    listeners = (each for each in there if each.status == psutil.CONN_LISTEN and each.pid is not None)
    return {each.laddr.port: each.pid for each in listeners if each.laddr and each.pid is not None}


def user_of(socket: sockets.socket) -> int:
    """Return the user of the process that has connected, or of one that listens when it began to (unix(7))."""
    _, user, _ = _CREDENTIALS.unpack(socket.getsockopt(sockets.SOL_SOCKET, sockets.SO_PEERCRED, _CREDENTIALS.size))
    return int(user)


def is_trusted(user: int) -> bool:
    """Return True if messages are exchanged with processes of `user`: this process's own, and root."""
    return user in (os.geteuid(), 0)
