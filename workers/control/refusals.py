"""Refusals of this process's keys at a broker's address, and a channel that dials again."""

from collections.abc import Callable

from stageline.broker.control.channel import ClientChannel
from stageline.broker.keys.admission import KeyRefusal
from stageline.broker.keys.pairs import KeyPair
from stageline.pipeline.addresses import masked, parted

NEW_LINE = "paste the line that the broker prints, or that `stageline keys invite` prints on its machine"

_TEXTS = {
    KeyRefusal.ANOTHER_KEY: (
        "the broker at {address} has another key than the address says: it is another broker, or another process "
        f"answers there; {NEW_LINE}"
    ),
    KeyRefusal.NO_KEYS: (
        "the process at {address} uses no keys: it is no broker, or one with broker.insecure = true; look at what "
        "listens there"
    ),
    KeyRefusal.KEYS_NEEDED: (
        f"the broker at {{address}} has keys, and this address has none; {NEW_LINE}, such as "
        "stageline worker --join 'tcp://desk:7000#k1....'"
    ),
}
REDIAL = 5.0  # seconds between two attempts to connect with a key that was refused


def explained(refusal: KeyRefusal, url: str, pair: KeyPair | None) -> str:
    """Return the text of a refusal, with the way out.

    Args:
        refusal: Reason why there is no connection.
        url: Address of the broker.
        pair: Pair with which it was dialled; None without a key.
    """
    if not refusal.may_pass or pair is None:
        return _TEXTS[refusal].format(address=shown(url))
    what = "has revoked" if refusal is KeyRefusal.REVOKED else "does not admit"
    return f"the broker at {shown(url)} {what} the key of this machine. {admitting(pair)}"


def shown(url: str) -> str:
    """Return the address, without its key and its password, for people."""
    return masked(parted(url)[0])


def admitting(pair: KeyPair) -> str:
    """Return how the key of this machine is admitted, as a sentence."""
    return f"On the broker's machine: stageline keys admit {pair.public.text}"


class RedialledChannel:
    """`ClientChannel` whose connection is a new one every `REDIAL` seconds while its keys are refused.

    ZeroMQ dials again by itself, but not after such a refusal: see `broker/transports/sockets/handshakes.py`. A person
    may admit the key later, and a broker may come back to the port that another process had for a moment.
    """

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
