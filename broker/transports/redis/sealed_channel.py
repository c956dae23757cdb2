"""Channels whose messages travel in boxes (`broker/keys/box.py`), over any channel that others may read and write."""

import os
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from time import monotonic

import structlog

from stageline.broker.control.channel import ClientChannel, Envelope, Received, ServerChannel
from stageline.broker.errors import AddressUnusable
from stageline.broker.keys.admission import KeyRefusal, ServerKeys
from stageline.broker.keys.box import BrokerBox, ClientBox
from stageline.broker.keys.join_line import keyed
from stageline.broker.keys.pairs import KeyPair, PublicKey

from .channel import RedisClientChannel, RedisServerChannel, broker_name

REPEAT = 0.5  # seconds after which an opening without a reply is sent again
UNCLEAR = 3  # openings without a reply, after which what is at the address is believed to be no broker for these keys
MOST = 64  # messages that wait for a session
LINGER = 0.5  # seconds that `close` waits for a session, if messages do

log = structlog.get_logger()


class SealedClientChannel:
    """`ClientChannel` over `channel`, whose refusal says what seems to be there; any client may forge that."""

    def __init__(self, channel: ClientChannel, box: ClientBox, clock: Callable[[], float] = monotonic) -> None:
        """Take over `channel`.

        Args:
            channel: Channel that others read and write.
            box: Box of the client, without a session.
            clock: Source of time, in seconds.
        """
        self._channel = channel
        self._box = box
        self._clock = clock
        self._waiting: deque[bytes] = deque(maxlen=MOST)
        self._asked = float("-inf")  # when the opening was sent last
        self._attempts = 0  # since the last reply
        self._reached = False  # by the last opening
        self._new = False

    @property
    def trouble(self) -> str:
        """The reason why the broker cannot be reached, or "" if none is known."""
        return self._channel.trouble

    @property
    def refusal(self) -> str:
        """The reason why there is no session, a `KeyRefusal`. The broker alone can say that the key is not admitted."""
        if self._box.refusal:
            return self._box.refusal
        return KeyRefusal.NONE if self._box.is_open or self._attempts < UNCLEAR else self._channel.refusal

    def send(self, message: bytes) -> bool:
        """Send `message`, once there is a session. Returns False if there is no broker, or none for this key."""
        self._note_broker()
        if self._box.is_open:
            self._ask()
            return self._channel.send(self._box.seal(message))
        if self._box.refusal or not self._ask():
            return False
        self._waiting.append(message)
        return True

    def receive(self, timeout: float) -> bytes | None:
        """Return the broker's next message, or None if none arrives within `timeout` seconds."""
        until = self._clock() + timeout
        while True:
            self._note_broker()
            self._ask()
            left = until - self._clock()
            due = self._asked + REPEAT - self._clock()
            frame = self._channel.receive(max(min(left, due) if self._box.opening else left, 0.0))
            message = None if frame is None else self._opened(frame)
            if message is not None or self._clock() >= until:
                return message

    def renewed(self) -> bool:
        """Return True if there is another session since the last call: the broker may not know this client."""
        self._note_broker()
        new, self._new = self._new, False
        return new

    def close(self) -> None:
        """Close the connection; messages that wait for a session do so for half a second at most."""
        until = self._clock() + LINGER
        with suppress(AddressUnusable):
            while self._waiting and not self._box.refusal and self._clock() < until:
                self.receive(until - self._clock())
        self._channel.close()

    def _note_broker(self) -> None:
        if self._channel.renewed():
            self._box.begin()
            self._asked, self._attempts = float("-inf"), 0

    def _ask(self) -> bool:
        """Send the opening if one is due. Returns False if there was no broker to send it to."""
        if self._box.opening and self._clock() - self._asked >= REPEAT:
            self._asked = self._clock()
            self._reached = self._channel.send(self._box.opening)
            self._attempts += self._reached
            self._channel.renewed()  # a broker that is new by now has the opening
        return self._reached

    def _opened(self, frame: bytes) -> bytes | None:
        is_asking, before = bool(self._box.opening), self._box.is_open
        message = self._box.open(frame)
        if is_asking and not self._box.opening:
            self._attempts = 0
            self._new = self._box.is_open or before
            self._send_waiting()
        return message

    def _send_waiting(self) -> None:
        while self._waiting and self._box.is_open:
            self._channel.send(self._box.seal(self._waiting.popleft()))


class SealedServerChannel:
    """`ServerChannel` over `channel`. A sender is a session, wherever its messages come from."""

    def __init__(self, channel: ServerChannel, box: BrokerBox, endpoint: str) -> None:
        """Take over `channel`.

        Args:
            channel: Channel that others read and write.
            box: Box of the broker.
            endpoint: Address with the broker's key.
        """
        self.endpoint = endpoint
        self.unopened = 0  # frames
        self._channel = channel
        self._box = box

    def receive(self, timeout: float) -> Sequence[Received] | None:
        """Return the messages that have arrived, as `ServerChannel.receive`; None for each that is not opened."""
        found = self._channel.receive(timeout)
        if found is None:
            return None
        answers: list[Envelope] = []
        opened = [each for address, frame in found for each in self._opened(address, frame or b"", answers)]
        if answers:
            self._channel.send(answers)
        return opened

    def key_of(self, sender: bytes) -> str:
        """Return the text of the public key that has proven itself in the session of `sender`; "" without one."""
        return self._box.key_of(sender)

    def trust(self, sender: bytes) -> None:
        """Give the connection of `sender` wider limits from now on."""
        if (address := self._box.address_of(sender)) is not None:
            self._channel.trust(address)

    def readmit(self) -> None:
        """Lose all sessions: clients open others, and are admitted or refused by their keys."""
        self._box.forget()

    def send(self, envelopes: Iterable[Envelope]) -> None:
        """Send messages to their recipients, sealed. A message is lost if its recipient has no session any more."""
        sealed = (self._box.seal(sender, message) for sender, message in envelopes)
        self._channel.send([each for each in sealed if each is not None])

    def close(self) -> None:
        """Release the address."""
        self._channel.close()

    def _opened(self, address: bytes, frame: bytes, answers: list[Envelope]) -> list[Received]:
        """Return the message in a frame, if there is one, and add what is to be answered to `answers`."""
        unboxed = self._box.open(address, frame)
        if unboxed is None:
            self._note_unopened()
            return [(address, None)]
        if unboxed.answer:
            answers.append((address, unboxed.answer))
        return [(unboxed.sender, unboxed.message)] if unboxed.sender else []

    def _note_unopened(self) -> None:
        self.unopened += 1
        if self.unopened == 1:
            log.warning(
                "ignored",
                reason="a control message that is not sealed for this broker, or came before: it is from a process "
                "without keys or with another run's, or a process between changes what passes. Others are counted, "
                "and not logged",
            )


def sealed_client(address: str, pair: KeyPair, key: PublicKey) -> SealedClientChannel:
    """Return the channel of a client through a Redis server.

    Args:
        address: Address of the broker, without its key.
        pair: Pair of the client.
        key: Key of the broker.

    Raises:
        AddressUnusable: The address is malformed.
    """
    box = ClientBox(pair, key, broker_name(address), os.urandom)
    return SealedClientChannel(RedisClientChannel(address, key), box)


def sealed_server(address: str, keys: ServerKeys) -> SealedServerChannel:
    """Return the channel of a broker with keys through a Redis server, as `RedisServerChannel` at this address."""
    box = BrokerBox(keys.pair, keys.admission, broker_name(address), os.urandom)
    public = keys.pair.public
    return SealedServerChannel(RedisServerChannel(address, public), box, keyed(address, public))
