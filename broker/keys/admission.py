"""Admission of keys, as the sockets of a process ask for it; their own keys; and why a client gets no connection."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from .pairs import KeyPair, PublicKey


class NotReady(Exception):
    """Answer of an admission that does not know yet who is admitted: a peer dials again."""


class Admission(Protocol):
    """Judge of keys, asked at each handshake, by a thread of its own."""

    def admits(self, public: PublicKey) -> bool:
        """Return True if who has the secret of `public` may connect. An answer holds until the connection ends.

        Raises `NotReady`.
        """

    def has_revoked(self, public: PublicKey) -> bool:
        """Return True if a person has revoked the key, which is not admitted since. Asked after `admits`."""


@dataclass(frozen=True, slots=True)
class ServerKeys:
    """Keys of what listens at an address.

    Attributes:
        pair: Pair by which peers know it; its public key stands in the keyed address.
        admission: Judge of the peers' keys.
    """

    pair: KeyPair
    admission: Admission


@dataclass(frozen=True, slots=True)
class QueueKeys(ServerKeys):
    """Keys of the queues of one worker, by whose pair it dials the others, too; their keys stand in their endpoints.

    Attributes:
        name: Name by which workers with one pair differ at a relay; "" if each has a pair of its own.
    """

    name: str = ""


class KeyRefusal(StrEnum):
    """Reason why a broker's address gives no connection."""

    NONE = ""
    NOT_ADMITTED = "not admitted"
    REVOKED = "revoked"  # by a person: it was admitted
    ANOTHER_KEY = "another broker's key"
    NO_KEYS = "no keys there"
    KEYS_NEEDED = "keys needed there"  # for a client without

    @property
    def may_pass(self) -> bool:
        """True if it may pass without a change of keys: a person may admit the key."""
        return self in (KeyRefusal.NOT_ADMITTED, KeyRefusal.REVOKED)
