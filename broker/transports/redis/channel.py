"""Control messages through a Redis server (or Valkey), for a broker and workers that can only connect outwards.

    stageline:{NAME}:broker        string   "HOST/PID/TOKEN" of the broker, or "KEY/TOKEN" of one with keys, whose
                                            messages travel in boxes; expires some seconds after it ends
    stageline:{NAME}:to-broker     list     messages to it: 16 bytes that name the sender, then the message
    stageline:{NAME}:to:SENDER     list     messages from it to one sender

NAME is what comes after # in the address, so that one server serves several brokers. Every key expires: messages that
are neither read nor repeated within a minute are dropped, and nothing stays on the server after a run.
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

from stageline.broker.control.channel import LARGEST, Envelope, Received
from stageline.broker.errors import AddressUnusable, EndpointTaken
from stageline.broker.keys.admission import KeyRefusal
from stageline.broker.keys.pairs import VERSION, PublicKey

from .answers import RedisAway, RedisRefusal, RedisUnfit, sound
from .connection import RedisLink
from .units import Command, Unit

NAME = "broker"  # of an address without one
TENURE = 3.0  # seconds after which a broker that does not refresh its key has lost its place
_REFRESH = 1.0  # seconds between two refreshes of the broker's key
_KEPT = b"60000"  # milliseconds that a message waits to be read
_MOST = 1000  # messages that wait at most; of more, the oldest are lost
_SENDER = 16  # bytes of a sender's address
_PAUSE = 0.05  # seconds between two attempts to reach a server that is away

log = structlog.get_logger()


class RedisClientChannel:
    """`ClientChannel` to a broker through a Redis server."""

    def __init__(self, url: str, key: PublicKey | None = None) -> None:
        """Prepare a connection, which is made on the first use.

        Args:
            url: Address, without a key.
            key: Key that the broker should have; None: it should have none.

        Raises:
            AddressUnusable: The URL is malformed.
        """
        self._expected = b"" if key is None else key.text.encode()
        self._me = secrets.token_hex(_SENDER // 2).encode()
        self._broker: bytes | None = None
        self._new = False
        self._reached = False
        self._logged = False
        self.trouble = ""
        try:
            self._link, self._prefix = _open(url)
        except RedisUnfit as error:
            raise AddressUnusable(f"cannot reach the broker: {error}") from error

    @property
    def refusal(self) -> str:
        """The reason why the broker that is named at the server is not the expected one, which any client may forge."""
        found = None if self._broker is None else _key_in(self._broker)
        if found in (None, self._expected):
            return KeyRefusal.NONE
        if not self._expected:
            return KeyRefusal.KEYS_NEEDED
        return KeyRefusal.ANOTHER_KEY if found else KeyRefusal.NO_KEYS

    def send(self, message: bytes) -> bool:
        """Send `message` to the broker. Returns False if there is none, or the server is away or refuses: it is lost.

        Raises `AddressUnusable` if the server was never reached and cannot be used as it is.
        """
        found = self._exchange(
            [[(b"GET", self._prefix + b"broker")], _push(self._prefix + b"to-broker", self._me + message)]
        )
        return found is not None and self._note_broker(found[0][0])

    def receive(self, timeout: float) -> bytes | None:
        """Return the broker's next message, or None if none arrives within `timeout` seconds.

        Raises `AddressUnusable` if the server was never reached and cannot be used as it is.
        """
        until = monotonic() + timeout
        found = self._exchange(
            [
                [(b"GET", self._prefix + b"broker")],
                [(b"BLPOP", self._prefix + b"to:" + self._me, _seconds(timeout))],
            ]
        )
        if found is None:
            Event().wait(max(0.0, min(until - monotonic(), _PAUSE)))
            return None
        self._note_broker(found[0][0])
        return found[1][0][1] if found[1][0] else None

    def renewed(self) -> bool:
        """Return True if the broker is a new one since the last call: it may not know this client."""
        new, self._new = self._new, False
        return new

    def close(self) -> None:
        """Close the connection."""
        self._link.close()

    def _note_broker(self, broker: bytes | None) -> bool:
        if broker is not None and broker != self._broker:
            self._broker, self._new = broker, True
        return broker is not None

    def _exchange(self, units: Sequence[Unit]) -> list[list[Any]] | None:
        """Return the replies; None if the server is away or refuses. Raises `AddressUnusable` if it is unfit."""
        try:
            answers = [sound(each) for each in self._link.exchange(units)]
        except (RedisAway, RedisRefusal, RedisUnfit) as error:
            self.trouble = str(error)
            unfit = isinstance(error, RedisUnfit)
            if unfit and not self._reached:
                raise AddressUnusable(f"cannot reach the broker: {error}") from error
            if unfit and not self._logged:  # it may be repaired; until then there is no broker
                log.warning("no connection to the broker", reason=str(error))
            self._logged = self._logged or unfit
            return None
        self._reached, self.trouble = True, ""
        return answers


class RedisServerChannel:
    """`ServerChannel` of a broker through a Redis server."""

    def __init__(self, url: str, key: PublicKey | None = None) -> None:
        """Take the place of the broker at the server, and drop messages to the one before.

        A broker that was killed is waited for until its key expires.

        Args:
            url: Address, without a key.
            key: Key that the broker is named by; None: by its host and process.

        Raises:
            EndpointTaken: Another broker has the place.
            RedisUnfit: The server cannot be used as it is.
            RedisAway: The server cannot be reached.
        """
        self.endpoint = url
        self._link, self._prefix = _open(url)
        label = f"{socket.gethostname()}/{os.getpid()}" if key is None else key.text
        self._me = f"{label}/{secrets.token_hex(8)}".encode()
        self._refreshed = 0.0
        self._away = False
        self._acquire()

    def key_of(self, sender: bytes) -> str:
        """Return "": the server does not say who has sent a message."""
        return ""

    def readmit(self) -> None:
        """Do nothing: the server admits clients."""

    def receive(self, timeout: float) -> Sequence[Received] | None:
        """Return the messages that have arrived; wait up to `timeout` seconds for the first.

        Returns None while the server is away or refuses.

        Raises:
            EndpointTaken: Another broker has taken over.
            RedisUnfit: The server cannot be used as it is any more.
        """
        inbox = self._prefix + b"to-broker"
        first, others = (b"BLPOP", inbox, _seconds(timeout)), (b"LPOP", inbox, b"999")
        try:
            if monotonic() - self._refreshed >= _REFRESH and not self._try_acquire():
                raise EndpointTaken(
                    f"another broker has taken over at {self._link.address}: {self._who()}. This one stops"
                )
            found = [sound(answers)[0] for answers in self._link.exchange([[first], [others]])]
        except (RedisAway, RedisRefusal) as error:
            self._note_server(str(error))
            Event().wait(timeout)
            return None
        self._note_server("")
        return [_received(value) for value in (*(found[0] or ())[1:], *(found[1] or ()))]

    def trust(self, sender: bytes) -> None:
        """Do nothing: the server alone limits those who can reach it."""

    def send(self, envelopes: Iterable[Envelope]) -> None:
        """Send messages to their recipients; they are lost if the server is away or refuses."""
        units = [_push(self._prefix + b"to:" + recipient, message) for recipient, message in envelopes if recipient]
        if not units:
            return
        try:
            for answers in self._link.exchange(units):
                sound(answers)
        except (RedisAway, RedisRefusal) as error:
            self._note_server(str(error))

    def close(self) -> None:
        """Delete the broker's key at once, if the server is reachable."""
        with suppress(RedisAway, RedisRefusal, RedisUnfit):  # then the key expires
            if self._holder() == self._me:  # a broker that takes the key just now sets it again within a second
                self._link.exchange([[(b"DEL", self._prefix + b"broker")]])
        self._link.close()

    def _acquire(self) -> None:
        """Take the broker's key; wait for the key of a broker that was killed to expire."""
        until = monotonic() + 2 * TENURE
        while not self._try_acquire():
            if monotonic() > until:
                raise EndpointTaken(
                    f"cannot listen at {self._link.address}: {self._who()} is there. Stop it, or give this one "
                    "another name after #, as in redis://host:6379/0#second; workers and commands need it too"
                )
            Event().wait(_PAUSE)
        self._link.ask(b"DEL", self._prefix + b"to-broker")  # messages to the broker before this one

    def _try_acquire(self) -> bool:
        tenure = b"%d" % int(TENURE * 1000)
        while self._link.ask(b"SET", self._prefix + b"broker", self._me, b"NX", b"PX", tenure) is None:
            holder = self._holder()
            if holder == self._me:
                break
            if holder is not None:  # else it was deleted just now
                return False
        self._link.ask(b"PEXPIRE", self._prefix + b"broker", tenure)
        self._refreshed = monotonic()
        return True

    def _holder(self) -> bytes | None:
        found: bytes | None = self._link.ask(b"GET", self._prefix + b"broker")
        return found

    def _who(self) -> str:
        holder = self._holder() or b""
        if key := _key_in(holder):
            return f"a broker with the key {key.decode()}"
        host, _, rest = holder.decode("utf-8", "replace").partition("/")
        return f"a broker (pid {rest.partition('/')[0]} on host {host})" if host else "another broker"

    def _note_server(self, trouble: str) -> None:
        """Log when the server is away, with the reason, and when it is back ("")."""
        if trouble and not self._away:
            log.warning("workers cannot reach the broker", reason=trouble)
        elif self._away and not trouble:
            log.info("the server is back", address=self._link.address)
        self._away = bool(trouble)


def _open(url: str) -> tuple[RedisLink, bytes]:
    """Return the server, and what the keys of the broker begin with."""
    return RedisLink(url.partition("#")[0]), f"stageline:{{{broker_name(url)}}}:".encode()


def broker_name(url: str) -> str:
    """Return the name of the broker at the address `url`, which has no key."""
    return unquote(url.partition("#")[2]) or NAME


def _key_in(broker: bytes) -> bytes:
    """Return the text of the key that a broker is named by, b"" without one."""
    return broker.rpartition(b"/")[0] if broker.startswith(f"{VERSION}.".encode()) and broker.count(b"/") == 1 else b""


def _seconds(timeout: float) -> bytes:
    """Return the time that a server is to wait, a millisecond at least: with 0, it would wait without end."""
    return b"%.3f" % max(timeout, 0.001)


def _push(key: bytes, value: bytes) -> list[Command]:
    return [(b"RPUSH", key, value), (b"LTRIM", key, b"%d" % -_MOST, b"-1"), (b"PEXPIRE", key, _KEPT)]


def _received(value: bytes) -> Received:
    message = value[_SENDER:]
    return value[:_SENDER], message if 0 < len(message) <= LARGEST else None
