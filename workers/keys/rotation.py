"""Rotation of a key: another takes its place in the key file once those who know it have confirmed the other.

own.key         the key that is used
own.key.next    the key that is to take its place; a rotation that was interrupted goes on with it
own.key.former  the key of before: brokers that have not confirmed the other, and those of its user, know it alone
"""

import shlex
from collections.abc import Mapping
from pathlib import Path

from stageline.broker.keys.pairs import KeyPair
from stageline.workers.disk.atomic_file import create_file, publish

from .key_file import KeyExists, new_pair, read_pair, stored_key
from .passphrase import new_passphrase


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
