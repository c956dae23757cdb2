"""Sentences through a Redis server (or Valkey), for broker and workers that can all dial out and nothing else.

    stageline:{NAME}:broker        string   "HOST/PID/TOKEN" of the broker that is there; gone some seconds after it is
    stageline:{NAME}:to-broker     list     what was said to it: 16 bytes that name the sender, then the sentence
    stageline:{NAME}:to:SENDER     list     what it said to one of them

NAME is what comes after # in the address, so that one server serves several brokers. Every key expires: what is
neither read nor said again within a minute is gone, and nothing stays on the server after a run.
"""

import os
import secrets
import socket
from collections.abc import Iterable, Sequence
from contextlib import suppress
from threading import Event
from time import monotonic
from typing import Any
from urllib.parse import unquote

import structlog

from stageline.broker.errors import AddressUnusable, EndpointTaken
from stageline.broker.network.redis_connection import Command, RedisAway, RedisLink, RedisRefusal, Unit, sound
from stageline.broker.network.redis_requirements import RedisUnfit

from .channel import LARGEST, Envelope

NAME = "broker"  # of an address without one
TENURE = 3.0  # seconds after which a broker that has gone without a word has left its place
_SAID = 1.0  # seconds between two words of a broker that it is there
_KEPT = b"60000"  # milliseconds that a sentence waits to be read
_MOST = 1000  # sentences that wait at most; of more, the oldest are lost
_SENDER = 16  # bytes of a sender's name
_PAUSE = 0.05  # seconds between two attempts to reach a server that is away

log = structlog.get_logger()


class _Keys:
    """Of the broker called `name`."""

    def __init__(self, name: str) -> None:
        self._home = f"stageline:{{{name}}}:".encode()
        self.broker = self._home + b"broker"
        self.to_broker = self._home + b"to-broker"

    def to(self, sender: bytes) -> bytes:
        return self._home + b"to:" + sender


class RedisClientChannel:
    """See `Box`. Raises `AddressUnusable`."""

    def __init__(self, url: str) -> None:
        self._me = secrets.token_hex(_SENDER // 2).encode()
        self._broker: bytes | None = None
        self._new = False
        self._reached = False
        self._complained = False
        self.trouble = ""
        try:
            self._link, self._keys = _opened(url)
        except RedisUnfit as error:
            raise AddressUnusable(f"cannot reach the broker: {error}") from error

    def send(self, sentence: bytes) -> bool:
        broker = self._exchange([[(b"GET", self._keys.broker)], _pushed(self._keys.to_broker, [self._me + sentence])])
        return broker is not None and self._saw(broker[0][0])

    def receive(self, timeout: float) -> bytes | None:
        until = monotonic() + timeout
        awaited = (b"BLPOP", self._keys.to(self._me), b"%.3f" % max(timeout, 0.001))
        found = self._exchange([[(b"GET", self._keys.broker)], [awaited]])
        if found is None:
            Event().wait(max(0.0, min(until - monotonic(), _PAUSE)))
            return None
        self._saw(found[0][0])
        return found[1][0][1] if found[1][0] else None

    def renewed(self) -> bool:
        new, self._new = self._new, False
        return new

    def close(self) -> None:
        self._link.close()

    def _saw(self, broker: bytes | None) -> bool:
        if broker is not None and broker != self._broker:
            self._broker, self._new = broker, True
        return broker is not None

    def _exchange(self, units: Sequence[Unit]) -> list[list[Any]] | None:
        """The answers; None if the server is away, or does not do it. Raises `AddressUnusable` if it never will."""
        try:
            answers = [sound(each) for each in self._link.exchange(units)]
        except (RedisAway, RedisRefusal) as error:
            self.trouble = str(error)
            return None
        except RedisUnfit as error:
            self.trouble = str(error)
            if not self._reached:
                raise AddressUnusable(f"cannot reach the broker: {error}") from error
            if not self._complained:  # somebody may mend it; until then there is no broker
                log.warning("no line to the broker", reason=str(error))
            self._complained = True
            return None
        self._reached, self.trouble = True, ""
        return answers


class RedisServerChannel:
    """See `Office`. Raises `EndpointTaken`, `RedisUnfit` and `RedisAway`."""

    def __init__(self, url: str) -> None:
        self.endpoint = url
        self._link, self._keys = _opened(url)
        self._me = f"{socket.gethostname()}/{os.getpid()}/{secrets.token_hex(8)}".encode()
        self._said = 0.0
        self._away = False
        self._take_place()

    def heard(self, timeout: float) -> Sequence[tuple[bytes, bytes | None]] | None:
        first, others = (b"BLPOP", self._keys.to_broker, b"%.3f" % timeout), (b"LPOP", self._keys.to_broker, b"999")
        try:
            self._stay()
            found = [sound(answers)[0] for answers in self._link.exchange([[first], [others]])]
        except (RedisAway, RedisRefusal) as error:
            self._note_away(str(error))
            Event().wait(timeout)
            return None
        self._note_back()
        words = [*(found[0] or ())[1:], *(found[1] or ())]
        return [_opened_letter(word) for word in words]

    def say(self, letters: Iterable[Envelope]) -> None:
        units = [_pushed(self._keys.to(recipient), [sentence]) for recipient, sentence in letters if recipient]
        if not units:
            return
        try:
            for answers in self._link.exchange(units):
                sound(answers)
        except (RedisAway, RedisRefusal) as error:
            self._note_away(str(error))

    def close(self) -> None:
        """Leaves the place at once, if the server is there."""
        with suppress(RedisAway, RedisRefusal, RedisUnfit):  # then it is left by itself
            if self._holder() == self._me:  # should another come in this moment, it says again within a second
                self._link.exchange([[(b"DEL", self._keys.broker)]])
        self._link.close()

    def _take_place(self) -> None:
        """Waits for the place of a broker that is gone without a word."""
        until = monotonic() + 2 * TENURE
        while not self._placed():
            if monotonic() > until:
                raise EndpointTaken(
                    f"cannot listen at {self._link.address}: {self._who()} is there. Stop it, or name this one by "
                    "another word after #, as in redis://host:6379/0#second; workers and commands need it too"
                )
            Event().wait(_PAUSE)
        self._link.ask(b"DEL", self._keys.to_broker)  # it was said to another, perhaps by those who are gone

    def _stay(self) -> None:
        """Says that this broker is there. Raises `EndpointTaken` if another has come in its place."""
        if monotonic() - self._said >= _SAID and not self._placed():
            raise EndpointTaken(f"another broker has come to {self._link.address}: {self._who()}. This one stops")

    def _placed(self) -> bool:
        tenure = b"%d" % int(TENURE * 1000)
        while self._link.ask(b"SET", self._keys.broker, self._me, b"NX", b"PX", tenure) is None:
            holder = self._holder()
            if holder == self._me:
                break
            if holder is not None:  # else it has left just now
                return False
        self._link.ask(b"PEXPIRE", self._keys.broker, tenure)
        self._said = monotonic()
        return True

    def _holder(self) -> bytes | None:
        found: bytes | None = self._link.ask(b"GET", self._keys.broker)
        return found

    def _who(self) -> str:
        host, _, rest = (self._holder() or b"").decode("utf-8", "replace").partition("/")
        return f"a broker (pid {rest.partition('/')[0]} on host {host})" if host else "another broker"

    def _note_away(self, reason: str) -> None:
        if not self._away:
            log.warning("nobody can reach the broker", reason=reason)
        self._away = True

    def _note_back(self) -> None:
        if self._away:
            log.info("the server is back", address=self._link.address)
        self._away = False


def _opened(url: str) -> tuple[RedisLink, _Keys]:
    address, _, name = url.partition("#")
    return RedisLink(address), _Keys(unquote(name) or NAME)


def _pushed(key: bytes, words: Sequence[bytes]) -> list[Command]:
    return [(b"RPUSH", key, *words), (b"LTRIM", key, b"%d" % -_MOST, b"-1"), (b"PEXPIRE", key, _KEPT)]


def _opened_letter(word: bytes) -> tuple[bytes, bytes | None]:
    sentence = word[_SENDER:]
    return word[:_SENDER], sentence if 0 < len(sentence) <= LARGEST else None
