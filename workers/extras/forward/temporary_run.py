"""The folder of a run that is only wanted while its command lasts: removed at its end, or, if that was killed, by the
next such command.

The process that makes it, and all its forks, have it open and locked: a folder that can be locked is abandoned.
"""

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

PREFIX = "stageline-forward-"


@contextmanager
def temporary_run_folder() -> Iterator[Path]:
    """A context with the folder. Raises `OSError`."""
    remove_abandoned_runs()
    with tempfile.TemporaryDirectory(prefix=PREFIX, ignore_cleanup_errors=True) as name:
        lock = os.open(name, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield Path(name)
        finally:
            os.close(lock)


def remove_abandoned_runs() -> None:
    """Removes this user's folders of which no process is left."""
    for path in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with suppress(OSError):  # it is gone, or no folder, or in use
            if path.lstat().st_uid == os.geteuid():
                _remove_if_abandoned(path)


def _remove_if_abandoned(path: Path) -> None:
    lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(path, ignore_errors=True)
    finally:
        os.close(lock)
