"""The process at the other end of a connection: of which user it is."""

import os
import socket as sockets
import struct

_CREDENTIALS = struct.Struct("3i")  # pid, user, group


def user_of(socket: sockets.socket) -> int:
    """The user of the process that has connected; of one that listens, at the time at which it began to (unix(7))."""
    _, user, _ = _CREDENTIALS.unpack(socket.getsockopt(sockets.SOL_SOCKET, sockets.SO_PEERCRED, _CREDENTIALS.size))
    return int(user)


def is_trusted(user: int) -> bool:
    """Whether messages are exchanged with processes of `user`: this process's own, and root."""
    return user in (os.geteuid(), 0)
