"""Files with a secret key each, in the key folder of the user or where STAGELINE_KEY_FILE says.

    ~/.config/stageline/keys/own.key          mode 0600, in a folder of mode 0700

    # Secret key of stageline. Its public key is k1.2n8Fh0XQ...
    k1-secret.9fJd2...

A file that others may read, or replace, is refused: who has a secret key speaks as its owner.
"""

import os
import re
import shlex
import stat
from collections.abc import Mapping
from pathlib import Path

from stageline.broker.keys.pairs import SECRET_BYTES, VERSION, KeyPair, decoded, encoded
from stageline.pipeline.errors import ExitCode, StagelineError
from stageline.workers.disk.atomic_file import create_file, make_folder

OWN = "own"  # the name of the key that this user's processes are known by, unless told otherwise
VARIABLE = "STAGELINE_KEY_FILE"
NAMES = re.compile(r"[a-z0-9][a-z0-9-]{0,31}")

_PREFIX = f"{VERSION}-secret."
_LONGEST = 4096  # bytes of a key file
_MINE = 0o600


class KeyUnusable(StagelineError):
    """Error that a key file is missing, is no key file, or is open to others.

    Mend: Run the command that the message ends with. If others could read the file, make a new key instead.

    Example: the key file /home/anna/.config/stageline/keys/own.key has mode 0644, so others may read it; expected 0600.
    Run: chmod 600 /home/anna/.config/stageline/keys/own.key
    """

    error_code = "SL604"
    exit_code = ExitCode.REFUSED


class KeyExists(StagelineError):
    """Error that a new key would take the place of another one.

    Mend: Give the new key another name, or move the old file away: what knows its public key knows no other.

    Example: there is a key already in /home/anna/.config/stageline/keys/own.key; give the new one another NAME, or move
    that file away
    """

    error_code = "SL605"


def key_path(name: str | None, environment: Mapping[str, str]) -> Path:
    """Return the path of the key file `name`; without a name, that of the key that this user's processes have.

    Raises `ValueError` for a name that is none.
    """
    given = environment.get(VARIABLE)
    if name is None and given:
        return Path(given).expanduser()
    name = OWN if name is None else name
    if not NAMES.fullmatch(name):
        raise ValueError(f"{name!r} is no name of a key: small letters, digits and -, 32 at most, such as hospital")
    config = environment.get("XDG_CONFIG_HOME")
    return (Path(config) if config else Path.home() / ".config") / "stageline" / "keys" / f"{name}.key"


def read_pair(path: Path) -> KeyPair:
    """Return the pair in the key file at `path`. Raises `KeyUnusable`, which names the file and the way out."""
    shown = shlex.quote(str(path))
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # a pipe would keep it waiting
    except FileNotFoundError as error:
        raise KeyUnusable(f"there is no key file {shown}; `stageline keys new [NAME]` makes one") from error
    except OSError as error:
        raise KeyUnusable(f"the key file {shown} cannot be read: {error.strerror}") from error
    try:
        _demand_private(os.fstat(descriptor), shown)
        _demand_folder(path)
        secret = _secret_in(os.read(descriptor, _LONGEST))
    finally:
        os.close(descriptor)
    if secret is None:
        raise KeyUnusable(f"{shown} is no key file: expected one line that begins with {_PREFIX}, and comments with #")
    return KeyPair.of_secret(secret)


def new_pair(path: Path) -> KeyPair:
    """Write a new pair to `path`, for this user alone, and return it.

    The folder of the file is made, for this user alone, if it is missing.

    Raises:
        KeyExists: There is a file.
        KeyUnusable: Others may write to the folder.
        OSError: The file could not be written.
    """
    if not path.parent.exists():
        make_folder(path.parent.parent)
        path.parent.mkdir(mode=0o700, exist_ok=True)
    _demand_folder(path)
    pair = KeyPair.generate()
    text = f"# Secret key of stageline. Its public key is {pair.public.text}\n{_PREFIX}{encoded(pair.secret)}\n"
    try:
        create_file(path, text.encode(), mode=_MINE)
    except FileExistsError as error:
        shown = shlex.quote(str(path))
        raise KeyExists(
            f"there is a key already in {shown}; give the new one another NAME, or move that file away"
        ) from error
    return pair


def _demand_private(found: os.stat_result, shown: str) -> None:
    """Raise `KeyUnusable` unless the open file is this user's, and no other user may read or write it."""
    if not stat.S_ISREG(found.st_mode):
        raise KeyUnusable(f"{shown} is no key file: it is not a regular file")
    if found.st_uid not in (os.geteuid(), 0):
        raise KeyUnusable(
            f"the key file {shown} belongs to user {found.st_uid}, not to user {os.geteuid()}, who reads it. "
            f"Run: sudo chown {os.geteuid()} {shown}"
        )
    mode = stat.S_IMODE(found.st_mode)
    if mode & 0o077:
        raise KeyUnusable(
            f"the key file {shown} has mode {mode:04o}, so others may read it; expected 0600. Run: chmod 600 {shown}"
        )


def _demand_folder(path: Path) -> None:
    """Raise `KeyUnusable` if others may replace files in the folder of `path`, wherever a link leads."""
    folder = path.resolve().parent
    mode = stat.S_IMODE(folder.stat().st_mode)
    if mode & 0o022 and not mode & stat.S_ISVTX:
        shown = shlex.quote(str(folder))
        raise KeyUnusable(
            f"the folder {shown} of a key file has mode {mode:04o}, so others may replace the key. "
            f"Run: chmod go-w {shown}"
        )


def _secret_in(content: bytes) -> bytes | None:
    """Return the secret key in the content of a key file; None if there is none, or something else."""
    lines = [line.strip() for line in content.decode("ascii", "replace").splitlines()]
    keys = [line for line in lines if line and not line.startswith("#")]
    if len(keys) != 1 or not keys[0].startswith(_PREFIX):
        return None
    return decoded(keys[0].removeprefix(_PREFIX), SECRET_BYTES)
