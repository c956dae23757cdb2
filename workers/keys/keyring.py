"""Keys by which the processes of this user are known on this machine.

own key           in the file that `key_path` names; made when it is first needed
operator's key    derived from it: that of commands, launchers and scripts towards the broker that has the own key
"""

import socket
from collections.abc import Mapping

from stageline.broker.keys.join_line import JoinLine, keyed, split_key
from stageline.broker.keys.pairs import KeyPair, invitation_secret, operator_pair
from stageline.pipeline.addresses import dialled

from .key_file import VARIABLE, KeyExists, key_path, new_pair, read_pair
from .private_file import KeyUnusable

_WAY_OUT = (
    f"Set {VARIABLE} to the path of a key file, or of one that can be made, such as /var/lib/stageline/own.key, and "
    "keep that file: a process with another key is another one to its broker"
)


def own_pair(environment: Mapping[str, str]) -> KeyPair:
    """Return the pair of this user on this machine, from its key file, which is made if it is missing.

    Raises `KeyUnusable` if the file cannot be made or read, or if others may read it.
    """
    try:
        path = key_path(None, environment)
    except RuntimeError as error:  # of pathlib: neither HOME nor the list of users has one
        raise KeyUnusable(f"this user has no home folder, where its key would be. {_WAY_OUT}") from error
    try:
        if not path.exists():
            return new_pair(path)
    except KeyExists:  # another process has made it in this moment
        pass
    except OSError as error:
        raise KeyUnusable(f"the key file {path} cannot be made: {error.strerror}. {_WAY_OUT}") from error
    return read_pair(path, environment)


def pair_towards(url: str, environment: Mapping[str, str]) -> KeyPair | None:
    """Return the pair with which this process dials the broker at `url`; None if the address has no key.

    That is the operator's if the key in the address is this user's own: who can read a broker's key file may give it
    orders. Raises `BadKey`, or `KeyUnusable`.
    """
    broker = split_key(url)[1]
    if broker is None:
        return None
    own = own_pair(environment)
    return operator_pair(own) if broker == own.public else own


def own_broker(url: str, environment: Mapping[str, str]) -> tuple[str, KeyPair]:
    """Return the keyed address of the broker with this user's key that is dialled at `url`, and the operator's pair.

    Raises `KeyUnusable`.
    """
    own = own_pair(environment)
    return keyed(url, own.public), operator_pair(own)


def own_address(url: str, environment: Mapping[str, str]) -> str:
    """Return the keyed address of the broker with this user's key, as other machines dial it.

    Args:
        url: Address at which the broker listens, keyed or not; for all interfaces, the result has this machine's name.
        environment: Variables, which may say where the key file is.

    Raises:
        KeyUnusable: The key cannot be made or read.
    """
    return keyed(dialled(split_key(url)[0], socket.gethostname()), own_pair(environment).public)


def own_join_line(url: str, run: str, environment: Mapping[str, str], serial: int = 0) -> str:
    """Return the join line of the broker with this user's key.

    Args:
        url: Address at which the broker listens; for all interfaces, the line has this machine's name.
        run: Id of the broker's run.
        environment: Variables, which may say where the key file is.
        serial: Number of the invitation. 0 is the one that every run has.

    Raises:
        KeyUnusable: The key cannot be made or read.
    """
    own = own_pair(environment)
    return JoinLine(dialled(url, socket.gethostname()), own.public, invitation_secret(own, run, serial)).text
