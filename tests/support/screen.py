"""A real terminal: a command runs behind a pseudo-terminal, keys are pressed, and what stands on the screen is read."""

import contextlib
import fcntl
import os
import struct
import subprocess
import sys
import termios
import threading
from collections.abc import Callable, Iterator, Sequence
from time import monotonic, sleep

import pyte

from support.workspace import Workspace

BOUND = 100.0  # seconds for what is waited for


class Screen:
    """The screen of a command, as `columns` and `rows` of text."""

    def __init__(self, process: "subprocess.Popen[bytes]", end: int, columns: int, rows: int) -> None:
        self.process = process
        self._end = end
        self._screen = pyte.Screen(columns, rows)
        self._stream = pyte.ByteStream(self._screen)
        self._lock = threading.Lock()
        self.raw = b""  # all that came
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        with contextlib.suppress(OSError):  # the command has ended, and with it the other end of the terminal
            while read := os.read(self._end, 65536):
                with self._lock:
                    self.raw += read
                    self._stream.feed(read)

    @property
    def rows(self) -> Sequence[str]:
        """The rows of the screen, without blanks at their ends."""
        with self._lock:
            return [row.rstrip() for row in self._screen.display]

    @property
    def text(self) -> str:
        """Text on the screen; a line that a narrow terminal has wrapped is one line."""
        lines = [""]
        for row in self.rows:
            lines[-1] += row
            if len(row) < self._screen.columns:
                lines.append("")
        return "\n".join(lines).rstrip("\n")

    def press(self, keys: str) -> None:
        """Presses keys; "\\r" is enter, "\\x1b" is escape."""
        os.write(self._end, keys.encode())

    def until(self, look: "str | Callable[[str], object]") -> str:
        """Waits until something stands on the screen; returns the whole of it."""
        deadline = monotonic() + BOUND
        while not (look in (text := self.text) if isinstance(look, str) else look(self.text)):
            assert monotonic() < deadline, f"{look} is not on the screen:\n{self.text}"
            sleep(0.02)
        return text if isinstance(look, str) else self.text

    def end(self) -> int:
        """Waits for the end of the command, and of what it prints; returns its exit code."""
        code = self.process.wait(BOUND)
        self._reader.join(BOUND)
        return code


@contextlib.contextmanager
def terminal(workspace: Workspace, *arguments: str, columns: int = 80, rows: int = 24) -> Iterator[Screen]:
    """A `stageline` command of its own interpreter in a terminal, in the folder of a workspace."""
    end, other = os.openpty()
    fcntl.ioctl(other, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
    own = {"TMPDIR": str(workspace.temporary), "STAGELINE_KEY_FILE": str(workspace.key), "TERM": "xterm-256color"}
    unset = ("NO_COLOR", "COLUMNS", "LINES", "COLORTERM")
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "stageline", *arguments],
        cwd=workspace.folder,
        env={name: value for name, value in os.environ.items() if name not in unset} | own,
        stdin=other,
        stdout=other,
        stderr=other,
        start_new_session=True,
    )
    os.close(other)
    try:
        yield Screen(process, end, columns, rows)
    finally:
        process.kill()
        process.wait()
        os.close(end)
