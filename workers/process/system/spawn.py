"""What starts a stageline command in a process of its own, and what is then known of that process."""

import subprocess
from collections.abc import Callable, Sequence
from time import monotonic, sleep
from typing import Protocol, TextIO

_LOOK = 0.01  # seconds between two calls of `poll`


class SpawnedProcess(Protocol):
    """A process that runs a stageline command. It knows of its end only by `poll` or `wait`."""

    @property
    def pid(self) -> int:
        """0 as long as it has not started."""

    @property
    def returncode(self) -> int | None:
        """As `subprocess` gives it: negative if a signal ended it; None while it runs. Anything that the process calls
        can choose it, so it says nothing about the command."""

    @property
    def result(self) -> int | None:
        """The exit code that the command returned; None if the process runs, or has ended without returning one: by
        `os._exit` in the user's code, by a signal, in a crash."""

    def poll(self) -> int | None:
        """`returncode` as of now."""

    def wait(self, timeout: float | None = None) -> int:
        """`returncode` once it has ended; raises `subprocess.TimeoutExpired` after `timeout` seconds."""

    def send_signal(self, sig: int) -> None:
        """Does nothing to a process that has ended."""

    def kill(self) -> None:
        """With SIGKILL."""


Spawn = Callable[[Sequence[str], TextIO], SpawnedProcess]
"""Called with the arguments of the command `stageline`, and the file that its output is appended to. The process gets a
session of its own, nothing on stdin, and the hidden option `--lifeline`."""


def wait_for_end(poll: Callable[[], int | None], timeout: float | None) -> int:
    """What `poll` returns once it is not None. Raises `subprocess.TimeoutExpired` after `timeout` seconds, if given."""
    deadline = None if timeout is None else monotonic() + timeout
    while (code := poll()) is None:
        if deadline is not None and monotonic() > deadline:
            raise subprocess.TimeoutExpired("stageline", timeout or 0.0)
        sleep(_LOOK)
    return code
