"""A folder for sockets among the system's temporary files, which does not stay behind, however its owners end.

Its owners are the process that makes it and those that are forked with `lock`, an open descriptor of the folder: the
system keeps the folder locked until the last of them has ended.

    remove_when_left    in the process that stays to the end: waits for that, and removes the folder
    remove_abandoned    at the next start: removes folders of which no owner is left, and none else

Only sockets and folders of sockets are ever removed: a folder that holds something else is another's, and stays.
"""

import fcntl
import os
import stat
import tempfile
from contextlib import AbstractContextManager, suppress
from pathlib import Path

PREFIX = "stageline."


class OwnedFolder(AbstractContextManager["OwnedFolder"]):
    """Made by this process; removed on leaving the context. Raises OSError."""

    def __init__(self) -> None:
        remove_abandoned()
        found = None
        while found is None:
            self.path = Path(tempfile.mkdtemp(prefix=PREFIX))
            found = _lock(self.path)  # None if a process that starts now took it for an abandoned one
        self.lock = found

    def __exit__(self, *_: object) -> None:
        self.leave()
        _remove(self.path)

    def leave(self) -> None:
        """This process owns it no longer."""
        if self.lock >= 0:
            os.close(self.lock)
            self.lock = -1


def remove_when_left(folder: Path, lock: int) -> None:
    """Gives up ownership by `lock`, waits until no other process owns the folder, and removes it."""
    os.close(lock)
    with suppress(OSError):  # another has removed it
        left = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        fcntl.flock(left, fcntl.LOCK_EX)
        _remove(folder)


def remove_abandoned() -> None:
    """Removes this user's folders of which no owner is left."""
    for path in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with suppress(OSError):  # it is gone, or no folder, or this process may not
            if path.lstat().st_uid == os.geteuid() and (lock := _lock(path)) is not None:
                _remove(path)
                os.close(lock)


def _remove(folder: Path) -> None:
    """Removes the folder with its sockets; if that is not possible, what is not removed stays."""
    with suppress(OSError):
        for path in folder.iterdir():
            if stat.S_ISDIR(path.lstat().st_mode):
                _remove(path)
            elif stat.S_ISSOCK(path.lstat().st_mode):
                path.unlink(missing_ok=True)
        folder.rmdir()


def _lock(path: Path) -> int | None:
    """A descriptor of the folder, locked; None if another process has it, or has removed it meanwhile."""
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
