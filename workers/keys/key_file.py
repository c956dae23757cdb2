"""Files with a secret key each, in the key folder of the user or where STAGELINE_KEY_FILE says.

    ~/.config/stageline/keys/own.key          mode 0600, in a folder of mode 0700

    # Secret key of stageline. Its public key is k1.2n8Fh0XQ...
    k1-secret.9fJd2...                        or k1-encrypted.EAgCx..., which a passphrase opens

A file that others may read, or replace, is refused: who has a secret key speaks as its owner. `stageline keys rotate`
puts another key in its place, once those who know it have confirmed the other:

    own.key.next      the key that is to take its place; a rotation that was interrupted goes on with it
    own.key.former    the key of before: brokers that have not confirmed the other, and those of its user, know it alone
"""

import os
import re
import shlex
from collections.abc import Mapping
from pathlib import Path

from stageline.broker.keys.pairs import SECRET_BYTES, VERSION, KeyPair, decoded, encoded
from stageline.pipeline.errors import StagelineError
from stageline.workers.disk.atomic_file import create_file, make_folder, publish

from .locked_key import PREFIX as LOCKED
from .locked_key import BadLockedKey, LockedKey
from .passphrase import new_passphrase, unlocked
from .private_file import KeyUnusable, demand_folder, read_private

OWN = "own"  # the name of the key that this user's processes are known by, unless told otherwise
VARIABLE = "STAGELINE_KEY_FILE"
NAMES = re.compile(r"[a-z0-9][a-z0-9-]{0,31}")

_BEGINNING = f"{VERSION}-secret."
_LONGEST = 4096  # bytes of a key file
_MINE = 0o600


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


def read_pair(path: Path, environment: Mapping[str, str] | None = None) -> KeyPair:
    """Return the pair in the key file at `path`, which is opened with its passphrase if it is encrypted.

    Args:
        path: Path of the file.
        environment: Variables, which may name a file with the passphrase; None: those of this process.

    Raises:
        KeyUnusable: It names the file and the way out.
    """
    found = stored_key(path)
    if isinstance(found, KeyPair):
        return found
    return unlocked(found, shlex.quote(str(path)), os.environ if environment is None else environment)


def stored_key(path: Path) -> KeyPair | LockedKey:
    """Return what the key file at `path` has, without asking for a passphrase. Raises `KeyUnusable`."""
    shown = shlex.quote(str(path))
    try:
        content = read_private(path, "key file", _LONGEST)
    except FileNotFoundError as error:
        raise KeyUnusable(f"there is no key file {shown}; `stageline keys new [NAME]` makes one") from error
    lines = [line.strip() for line in content.decode("ascii", "replace").splitlines()]
    words = [line for line in lines if line and not line.startswith("#")]
    if len(words) == 1 and words[0].startswith(LOCKED):
        try:
            return LockedKey.parse(words[0])
        except BadLockedKey as error:
            raise KeyUnusable(f"the encrypted key file {shown} {error}. Copy it again, or make a new key") from error
    secret = None
    if len(words) == 1 and words[0].startswith(_BEGINNING):
        secret = decoded(words[0].removeprefix(_BEGINNING), SECRET_BYTES)
    if secret is None:
        raise KeyUnusable(
            f"{shown} is no key file: expected one line that begins with {_BEGINNING}, and comments with #"
        )
    return KeyPair.of_secret(secret)


def new_pair(path: Path, passphrase: bytes | None = None) -> KeyPair:
    """Write a new pair to `path`, for this user alone, and return it.

    The folder of the file is made, for this user alone, if it is missing.

    Args:
        path: Path of the file.
        passphrase: Encrypts the file; None: it is not encrypted.

    Raises:
        KeyExists: There is a file.
        KeyUnusable: Others may write to the folder.
        OSError: The file could not be written.
    """
    if not path.parent.exists():
        make_folder(path.parent.parent)
        path.parent.mkdir(mode=0o700, exist_ok=True)
    demand_folder(path, "key file")
    pair = KeyPair.generate()
    kind, word = "Secret", f"{_BEGINNING}{encoded(pair.secret)}"
    if passphrase is not None:
        kind, word = "Encrypted secret", LockedKey.lock(pair, passphrase).text
    text = f"# {kind} key of stageline. Its public key is {pair.public.text}\n{word}\n"
    try:
        create_file(path, text.encode(), mode=_MINE)
    except FileExistsError as error:
        shown = shlex.quote(str(path))
        raise KeyExists(
            f"there is a key already in {shown}; give the new one another NAME, or move that file away"
        ) from error
    return pair


def next_path(path: Path) -> Path:
    """Return the path of the key that is to take the place of the one at `path`."""
    return _beside(path, "next")


def former_path(path: Path) -> Path:
    """Return the path at which the key of before is kept."""
    return _beside(path, "former")


def _beside(path: Path, end: str) -> Path:
    file = path.resolve()  # `path` may be a link, which stays
    return file.with_name(f"{file.name}.{end}")


def next_pair(path: Path, environment: Mapping[str, str]) -> KeyPair:
    """Return the pair that is to take the place of the one at `path`, which is made unless it is there already.

    Raises:
        KeyExists: A former key of before has not been deleted.
        KeyUnusable: The file cannot be read, or there is no passphrase for it.
        OSError: The file could not be written.
    """
    former = former_path(path)
    if former.exists() and former.read_bytes() != path.read_bytes():  # else it was interrupted after its last copy
        shown = shlex.quote(str(former))
        raise KeyExists(
            f"there is a former key in {shown}: delete it once nothing knows it any more, then rotate again"
        )
    following = next_path(path)
    if following.exists():
        return read_pair(following, environment)
    locked = not isinstance(stored_key(path), KeyPair)
    return new_pair(following, new_passphrase(shlex.quote(str(following)), environment) if locked else None)


def put_next_in_place(path: Path) -> None:
    """Have the next key take the place of the one at `path`, in one instant; keep the key of before beside it.

    Of a link, that is the file to which it leads.

    Raises:
        OSError: A file could not be written. Nothing is lost, and it may be done again.
    """
    if not former_path(path).exists():
        create_file(former_path(path), path.read_bytes(), mode=0o600)
    publish(next_path(path), path.resolve())
