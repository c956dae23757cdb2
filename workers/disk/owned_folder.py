"""Folder among the system's temporary files, for sockets or files, that is removed however its owners end.

Its owners are the process that makes it and those that are forked with `lock`, an open descriptor of the folder: the
system keeps the folder locked until the last of them has ended.

    remove_when_left    in the process that stays to the end: waits for that, and removes the folder
    remove_abandoned    at the next start: removes only folders that have no owner left

Paths of sockets have few bytes: `demand_short_socket_paths` refuses a folder for temporary files that is too deep.

Of folders for sockets, only sockets and folders of sockets are ever removed: a folder that holds something else is
another's, and stays. A folder with files has a prefix of its own, under which no other program makes any.
"""

import fcntl
import os
import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from pathlib import Path

import zmq

from stageline.pipeline.errors import StagelineError

PREFIX = "stageline."


def remove_sockets(folder: Path) -> None:
    """Remove a folder with its sockets; what cannot be removed stays."""
    with suppress(OSError):
        for path in folder.iterdir():
            own = not path.is_symlink()
            if own and path.is_dir():
                remove_sockets(path)
            elif own and path.is_socket():
                path.unlink(missing_ok=True)
        folder.rmdir()


class OwnedFolder(AbstractContextManager["OwnedFolder"]):
    """Temporary folder that this process makes, and removes on leaving the context.

    Attributes:
        path: Path of the folder.
        lock: Descriptor that owns the folder; -1 once it is left.
    """

    def __init__(self, prefix: str = PREFIX, remove: Callable[[Path], object] = remove_sockets) -> None:
        """Remove abandoned folders of the same prefix, and make one. Raises `OSError`.

        Args:
            prefix: Beginning of the folder's name.
            remove: Removes a folder of that prefix; by default, only if it holds nothing but sockets.
        """
        self._remove = remove
        remove_abandoned(prefix, self._remove)
        found = None
        while found is None:
            self.path = Path(tempfile.mkdtemp(prefix=prefix))
            found = _lock(self.path)  # None if a process that starts now took it for an abandoned one
        self.lock = found

    def __exit__(self, *_: object) -> None:
        """Give up ownership and remove the folder."""
        self.leave()
        self._remove(self.path)

    def leave(self) -> None:
        """Give up this process's ownership of the folder."""
        if self.lock >= 0:
            os.close(self.lock)
            self.lock = -1


def remove_when_left(folder: Path, lock: int) -> None:
    """Give up ownership by `lock`, wait until no other process owns the folder, and remove it."""
    os.close(lock)
    with suppress(OSError):  # another has removed it
        left = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        fcntl.flock(left, fcntl.LOCK_EX)
        remove_sockets(folder)


def remove_abandoned(prefix: str = PREFIX, remove: Callable[[Path], object] = remove_sockets) -> None:
    """Remove this user's folders of that `prefix` that have no owner left."""
    for path in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
        with suppress(OSError):  # it is gone, or no folder, or this process may not
            if path.lstat().st_uid == os.geteuid() and (lock := _lock(path)) is not None:
                remove(path)
                os.close(lock)


def _lock(path: Path) -> int | None:
    """Return a locked descriptor of the folder; None if another process owns it, or has removed it."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(fd), path.lstat()):
            return fd
    except (BlockingIOError, FileNotFoundError):
        pass
    os.close(fd)
    return None


# What a worker that `train` started adds to the folder for temporary files: the run's folder, its own in it, a socket.
_DEEPEST = "stageline-xxxxxxxx/stageline-xxxxxxxx/queues"


class TooDeep(StagelineError):
    """Error that the path of the folder for temporary files is too long for sockets in it.

    Mend: Set TMPDIR to a shorter folder, such as /tmp.

    Example: the path of the folder for temporary files, /scratch/jobs/1234/a/b/c, is too long for sockets: they would
    have paths of 120 bytes, 107 are the most. Set TMPDIR to a shorter folder
    """

    error_code = "SL320"


def longest_socket_path() -> int:
    """Return the length in bytes of a socket's longest path; the system allows about a hundred."""
    return len(os.fsencode(os.path.join(tempfile.gettempdir(), _DEEPEST)))


def demand_short_socket_paths() -> None:
    """Raise `TooDeep` if a socket cannot be made in the folder for temporary files."""
    if longest_socket_path() > zmq.IPC_PATH_MAX_LEN:
        raise TooDeep(
            f"the path of the folder for temporary files, {tempfile.gettempdir()}, is too long for sockets: they would "
            f"have paths of {longest_socket_path()} bytes, {zmq.IPC_PATH_MAX_LEN} are the most. Set TMPDIR to a "
            f"shorter folder"
        )
