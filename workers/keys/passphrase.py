"""Passphrase of an encrypted key file: from the file that STAGELINE_KEY_PASSPHRASE_FILE names, or asked for.

It is asked for at the terminal, never read from standard input, which carries a join line or nothing. A process asks
once for each key: what it has opened stays open.
"""

import os
from collections.abc import Mapping
from functools import lru_cache
from getpass import getpass
from pathlib import Path

from stageline.broker.keys.pairs import KeyPair

from .locked_key import LockedKey, WrongPassphrase
from .private_file import KeyUnusable, read_private

VARIABLE = "STAGELINE_KEY_PASSPHRASE_FILE"
SHORTEST = 8  # bytes of a new passphrase
LONGEST = 1024  # bytes
_TERMINAL = "/dev/tty"


class KeyLocked(KeyUnusable):
    """Error that an encrypted key file is not opened: there is no passphrase, or it is another one.

    Mend: Type the passphrase again, or have STAGELINE_KEY_PASSPHRASE_FILE name a file with it that this user alone may
    read. A passphrase that is lost cannot be replaced: make a new key.

    Example: the passphrase does not open the key file /home/anna/.config/stageline/keys/own.key: it is another one, or
    the file was changed
    """

    error_code = "SL608"


def unlocked(key: LockedKey, shown: str, environment: Mapping[str, str]) -> KeyPair:
    """Return the pair of a locked key.

    Args:
        key: Key.
        shown: Path of its file, for people.
        environment: Variables, which may name a file with the passphrase.

    Raises:
        KeyLocked: There is no passphrase, or another one.
        KeyUnusable: Others may read the file with the passphrase.
    """
    return _unlocked(key, shown, environment.get(VARIABLE, ""))


@lru_cache(maxsize=8)
def _unlocked(key: LockedKey, shown: str, file: str) -> KeyPair:
    passphrase = _in_file(file) if file else _typed(f"passphrase of {shown}: ", shown)
    try:
        return key.open(passphrase)
    except WrongPassphrase as error:
        what = f"in {file} " if file else ""
        raise KeyLocked(
            f"the passphrase {what}does not open the key file {shown}: it is another one, or the file was changed"
        ) from error


def new_passphrase(shown: str, environment: Mapping[str, str]) -> bytes:
    """Return the passphrase for a new key file; one that is typed is typed twice. Raises `KeyLocked`, `KeyUnusable`."""
    if file := environment.get(VARIABLE, ""):
        found = _in_file(file)
    else:
        found = _typed(f"passphrase for {shown}: ", shown)
        if _typed("the same again: ", shown) != found:
            raise KeyLocked(f"two passphrases were typed for {shown}: type the same one twice")
    if len(found) < SHORTEST:
        raise KeyLocked(f"the passphrase for {shown} has {len(found)} bytes, expected {SHORTEST} at least")
    return found


def _in_file(name: str) -> bytes:
    """Return the passphrase in a file: its content, without the end of a line."""
    path = Path(name).expanduser()
    try:
        content = read_private(path, "file with a passphrase", LONGEST + 2)
    except FileNotFoundError as error:
        raise KeyLocked(f"there is no file {name}, where {VARIABLE} says that the passphrase is") from error
    found = content.removesuffix(b"\n").removesuffix(b"\r")
    if not found or len(found) > LONGEST or b"\n" in found:
        raise KeyLocked(f"{name} is no file with a passphrase: expected one line of 1 to {LONGEST} bytes")
    return found


def _typed(prompt: str, shown: str) -> bytes:
    """Return what is typed at the terminal, which does not show it. Raises `KeyLocked` if there is none."""
    try:
        os.close(os.open(_TERMINAL, os.O_RDWR | os.O_NOCTTY))
    except OSError as error:
        raise KeyLocked(
            f"the key file {shown} is encrypted, and there is no terminal to ask for its passphrase at: set {VARIABLE} "
            "to the path of a file with it, mode 0600"
        ) from error
    try:
        return getpass(prompt).encode()[:LONGEST]
    except EOFError as error:
        raise KeyLocked(f"no passphrase was typed for {shown}") from error
