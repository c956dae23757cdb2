"""Report of a launcher to its script: messages in a file without a name that both have open."""

import os
from collections.abc import Iterator

import msgspec

from stageline.workers.runs.folder import LaunchOutcome


class LaunchStarted(msgspec.Struct, frozen=True, tag=True):
    """Message at the start: the broker's address, and the folder for sockets, which is removed at the end."""

    broker: str
    sockets: str


LaunchMessage = LaunchStarted | LaunchOutcome | str
"""The beginning of a run, its end, and in between a line for people for each worker that was lost."""


class LauncherReport:
    """Messages of the launcher to the script, in a file without a name that both have open."""

    def __init__(self, fd: int) -> None:
        """Use the open file `fd`."""
        self.fd = fd
        self._read = 0  # bytes
        self._decoder = msgspec.json.Decoder(LaunchMessage)

    def write(self, message: LaunchMessage) -> None:
        """Append a message."""
        os.write(self.fd, msgspec.json.encode(message) + b"\n")

    def read(self) -> Iterator[LaunchMessage]:
        """Yield the messages since the last call."""
        text = os.pread(self.fd, os.fstat(self.fd).st_size - self._read, self._read)
        whole = text[: text.rfind(b"\n") + 1]
        self._read += len(whole)
        yield from map(self._decoder.decode, whole.splitlines())

    def close(self) -> None:
        """Close the file."""
        os.close(self.fd)
