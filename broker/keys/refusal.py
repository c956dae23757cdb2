"""Reasons why what is at a broker's address gives a client no connection."""

from enum import StrEnum


class KeyRefusal(StrEnum):
    """Reason why a broker's address gives no connection. Only `NOT_ADMITTED` may pass without a change of keys."""

    NONE = ""
    NOT_ADMITTED = "not admitted"
    ANOTHER_KEY = "another broker's key"
    NO_KEYS = "no keys there"
    KEYS_NEEDED = "keys needed there"  # for a client without
