"""Files that this user alone may read or replace: each is refused otherwise, with the command that mends it."""

import os
import shlex
import stat
from pathlib import Path

from stageline.pipeline.errors import ExitCode, StagelineError


class KeyUnusable(StagelineError):
    """Error that a key file is missing, is no key file, or is open to others.

    Mend: Run the command that the message ends with. If others could read the file, make a new key instead.

    Example: the key file /home/anna/.config/stageline/keys/own.key has mode 0644, so others may read it; expected 0600.
    Run: chmod 600 /home/anna/.config/stageline/keys/own.key
    """

    error_code = "SL604"
    exit_code = ExitCode.REFUSED


def read_private(path: Path, kind: str, most: int) -> bytes:
    """Return the first `most` bytes of a file, which no other user may read or replace.

    Args:
        path: Path of the file.
        kind: What the file is, such as "key file".
        most: Most bytes to read.

    Raises:
        FileNotFoundError: There is none.
        KeyUnusable: Others may read or replace it, or it cannot be read.
    """
    shown = shlex.quote(str(path))
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # a pipe would keep it waiting
    except FileNotFoundError:
        raise
    except OSError as error:
        raise KeyUnusable(f"the {kind} {shown} cannot be read: {error.strerror}") from error
    try:
        _demand_private(os.fstat(descriptor), shown, kind)
        demand_folder(path, kind)
        return os.read(descriptor, most)
    finally:
        os.close(descriptor)


def _demand_private(found: os.stat_result, shown: str, kind: str) -> None:
    """Raise `KeyUnusable` unless the open file is this user's, and no other user may read or write it."""
    if not stat.S_ISREG(found.st_mode):
        raise KeyUnusable(f"{shown} is no {kind}: it is not a regular file")
    if found.st_uid not in (os.geteuid(), 0):
        raise KeyUnusable(
            f"the {kind} {shown} belongs to user {found.st_uid}, not to user {os.geteuid()}, who reads it. "
            f"Run: sudo chown {os.geteuid()} {shown}"
        )
    permissions = stat.S_IMODE(found.st_mode)
    if permissions & 0o077:
        raise KeyUnusable(
            f"the {kind} {shown} has mode {permissions:04o}, so others may read it; expected 0600. "
            f"Run: chmod 600 {shown}"
        )


def demand_folder(path: Path, kind: str) -> None:
    """Raise `KeyUnusable` if others may replace files in the folder of `path`, wherever a link leads."""
    folder = path.resolve().parent
    permissions = stat.S_IMODE(folder.stat().st_mode)
    if permissions & 0o022 and not permissions & stat.S_ISVTX:
        shown = shlex.quote(str(folder))
        raise KeyUnusable(
            f"the folder {shown} of a {kind} has mode {permissions:04o}, so others may replace it. "
            f"Run: chmod go-w {shown}"
        )
