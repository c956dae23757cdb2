"""The link between a worker and the keeper that starts it again: each learns of the other's end by it.

keeper ──holds one end──> worker: `KeeperLink`       the worker ends with its keeper, however that one was ended
       <── "over" ──────  worker               the broker has said that the run is over
"""

import os
import socket

from stageline.pipeline.errors import ExitCode

from .lifeline import NONE, Lifeline, kill_with_parent

OVER = b"over\n"


class KeeperLink:
    """The worker's end of the link."""

    def __init__(self, fd: int = NONE) -> None:
        """Take the descriptor, and end with the keeper from now on, also if this process is stopped or hangs then.

        With `NONE`, nothing keeps this process. Raises `OSError` if the descriptor is not open.
        """
        self._fd = fd
        lifeline = Lifeline(fd)
        if fd == NONE:
            return
        kill_with_parent()
        if lifeline.cut:  # before the system was asked
            os._exit(ExitCode.FAILED)
        lifeline.end_process_when_cut(after=0.0)

    def say_over(self) -> None:
        """Tell the keeper that the broker has said that the run is over."""
        if self._fd != NONE:
            os.write(self._fd, OVER)


def link() -> tuple[socket.socket, socket.socket]:
    """Return the ends of a link: the keeper's, and one for the worker to inherit."""
    mine, theirs = socket.socketpair()
    mine.setblocking(False)
    return mine, theirs


def has_said_over(mine: socket.socket) -> bool:
    """Return True if the worker at the other end has said that the run is over."""
    try:
        return mine.recv(len(OVER)) == OVER
    except BlockingIOError:
        return False
