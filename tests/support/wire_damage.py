"""Damage by a bad wire to the bytes that pass a proxy: to one piece of them after another, each time somewhere else.

After a while it is a good one: a wire on which no connection stands long enough to be made carries nothing.
"""

import random
from collections.abc import Callable
from time import sleep

from support.proxy import Lost, Proxy

KINDS = ("cuts", "delays", "corrupts", "truncates")
EVERY = 9  # pieces, of which one is harmed
MOST = 8  # harms


class BadWire:
    """A `Change` for both directions of `proxy`; `note` is called when it has done something."""

    def __init__(self, proxy: Proxy, kind: str, note: Callable[[], None]) -> None:
        self._proxy = proxy
        self._harm: Callable[[bytes], bytes] = getattr(self, f"_{kind}")
        self._note = note
        self._dice = random.Random(kind)
        self._pieces = self._harms = 0
        proxy.change = proxy.change_there = self

    def __call__(self, passing: bytes) -> bytes:
        self._pieces += 1
        if self._pieces % EVERY or self._harms == MOST:
            return passing
        self._harms += 1
        self._note()
        return self._harm(passing)

    def _cuts(self, passing: bytes) -> bytes:
        self._proxy.cut()
        return passing

    def _delays(self, passing: bytes) -> bytes:
        sleep(0.2)
        return passing

    def _corrupts(self, passing: bytes) -> bytes:
        """In what a message holds, not in how long it is: of that, the receiver waits half a minute for the rest."""
        return passing[:-1] + bytes([passing[-1] ^ 1 << self._dice.randrange(8)])

    def _truncates(self, passing: bytes) -> bytes:
        raise Lost(passing[: self._dice.randrange(len(passing))])
