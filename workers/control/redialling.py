"""Connection that is dialled again while what is at the broker's address refuses the keys of this process.

ZeroMQ dials again by itself, but not after such a refusal: see `broker/transports/sockets/handshakes.py`. A person may
admit the key later, and a broker may come back to the port that another process had for a moment.
"""

from collections.abc import Callable

from stageline.broker.control.channel import ClientChannel
from stageline.broker.keys.refusal import KeyRefusal

REDIAL = 5.0  # seconds between two attempts to connect with a key that was refused


class RedialledChannel:
    """`ClientChannel` whose connection is a new one every `REDIAL` seconds while its keys are refused."""

    def __init__(self, dial: Callable[[], ClientChannel], now: Callable[[], float]) -> None:
        """Dial.

        Args:
            dial: Opens a channel; its errors are raised.
            now: Returns the present time, in seconds.
        """
        self._dial = dial
        self._now = now
        self._channel = dial()
        self._dialled = now()
        self._refusal = KeyRefusal.NONE
        self._since = 0.0  # when the key was first refused, of those in a row
        self._renewed = False

    @property
    def trouble(self) -> str:
        """See `ClientChannel`."""
        return self._channel.trouble

    @property
    def refusal(self) -> KeyRefusal:
        """See `ClientChannel`. A refusal stands until there is a connection."""
        found = KeyRefusal(self._channel.refusal)
        self._renewed = self.renewed()  # is told later
        if found and not self._refusal:
            self._since = self._now()
        self._refusal = found or self._refusal
        if found and self._now() - self._dialled >= REDIAL:
            self._channel.close()
            self._channel, self._dialled = self._dial(), self._now()
        return self._refusal

    @property
    def refused_for(self) -> float:
        """Seconds since the key was first refused; 0.0 if there is, or may be, a connection."""
        return self._now() - self._since if self.refusal else 0.0

    def send(self, message: bytes) -> bool:
        """See `ClientChannel`."""
        return self._channel.send(message)

    def receive(self, timeout: float) -> bytes | None:
        """See `ClientChannel`."""
        return self._channel.receive(timeout)

    def renewed(self) -> bool:
        """See `ClientChannel`."""
        new, self._renewed = self._channel.renewed() or self._renewed, False
        if new:
            self._refusal = KeyRefusal.NONE
        return new

    def close(self) -> None:
        """See `ClientChannel`."""
        self._channel.close()
