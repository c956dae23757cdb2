"""How long the paths of sockets become in the folder for temporary files: the system allows about a hundred bytes."""

import os
import tempfile

import zmq

from stageline.pipeline.errors import StagelineError

# What a worker that `train` started adds: a folder of the run's, one of its own in it, a socket.
_DEEPEST = "stageline-xxxxxxxx/stageline-xxxxxxxx/queues"


class TooDeep(StagelineError):
    """The folder for temporary files has too long a path for sockets in it."""


def length() -> int:
    """The bytes of the longest path that a socket gets."""
    return len(os.fsencode(os.path.join(tempfile.gettempdir(), _DEEPEST)))


def check() -> None:
    """Raises `TooDeep` if a socket cannot be made in the folder for temporary files."""
    if length() > zmq.IPC_PATH_MAX_LEN:
        raise TooDeep(
            f"the path of the folder for temporary files, {tempfile.gettempdir()}, is too long for sockets: they would "
            f"have paths of {length()} bytes, {zmq.IPC_PATH_MAX_LEN} are the most. Set TMPDIR to a shorter folder"
        )
