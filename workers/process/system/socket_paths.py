"""Whether sockets can be made in the folder for temporary files: their paths have few bytes."""

import os
import tempfile

import zmq

from stageline.pipeline.errors import StagelineError

# What a worker that `train` started adds to the folder for temporary files: the run's folder, its own in it, a socket.
_DEEPEST = "stageline-xxxxxxxx/stageline-xxxxxxxx/queues"


class TooDeep(StagelineError):
    """The folder for temporary files has too long a path for sockets in it."""


def longest_socket_path() -> int:
    """The bytes of the longest path that a socket gets; the system allows about a hundred."""
    return len(os.fsencode(os.path.join(tempfile.gettempdir(), _DEEPEST)))


def demand_short_socket_paths() -> None:
    """Raises `TooDeep` if a socket cannot be made in the folder for temporary files."""
    if longest_socket_path() > zmq.IPC_PATH_MAX_LEN:
        raise TooDeep(
            f"the path of the folder for temporary files, {tempfile.gettempdir()}, is too long for sockets: they would "
            f"have paths of {longest_socket_path()} bytes, {zmq.IPC_PATH_MAX_LEN} are the most. Set TMPDIR to a "
            f"shorter folder"
        )
