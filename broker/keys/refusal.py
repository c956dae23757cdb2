"""Reasons why what is at a broker's address gives a client no connection."""

from enum import StrEnum


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
