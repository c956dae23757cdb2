"""How sentences go to the broker and back, whatever carries them.

    worker, command    Box.send  ------------------->  Office.heard    broker
                       Box.receive  <----------------  Office.say

A sentence may get lost: whoever needs it to arrive says it again until there is an answer.
"""

from collections.abc import Iterable, Sequence
from typing import Protocol

LARGEST = 64 * 2**20  # bytes of a sentence; the digests of a very large model are the longest
REDIS = ("redis://", "rediss://", "unix://")

Envelope = tuple[bytes, bytes]  # who is at the other end, and a sentence


class ClientChannel(Protocol):
    """One end of a line to the broker. For one thread at a time."""

    @property
    def trouble(self) -> str:
        """Why nobody can be reached, if that is known; "" if it is not."""

    def send(self, sentence: bytes) -> bool:
        """False if there is no broker at the moment: the sentence is lost."""

    def receive(self, timeout: float) -> bytes | None:
        """The next of the broker's sentences; None if none comes within `timeout` seconds."""

    def renewed(self) -> bool:
        """Whether there is another broker than at the last call, or a new connection: it may not know us."""

    def close(self) -> None:
        """Lets go of the line; what was sent still goes out, for half a second at most."""


class ServerChannel(Protocol):
    """The broker's end of all lines."""

    endpoint: str  # where a `ClientChannel` finds it

    def heard(self, timeout: float) -> Sequence[tuple[bytes, bytes | None]] | None:
        """What has come, and from whom; waits up to `timeout` seconds for the first. A sentence that no line of ours
        can have brought is None. All is None while nobody can reach the broker: then nobody can be judged either."""

    def say(self, letters: Iterable[Envelope]) -> None:
        """Sends sentences. One whose recipient is gone is lost, and so is what a slow one does not take in."""

    def close(self) -> None:
        """Lets go of the address."""


def open_client(url: str, *, keeps: bool = False) -> ClientChannel:
    """A line to the broker at `url`. With `keeps`, what is sent before there is a connection waits for it.

    Raises `AddressUnusable`.
    """
    if url.startswith(REDIS):
        from .redis_channel import RedisClientChannel  # takes time to load

        return RedisClientChannel(url)
    from .zeromq_channel import ZeroMQClientChannel

    return ZeroMQClientChannel(url, keeps=keeps)


def open_server(url: str) -> ServerChannel:
    """All lines of the broker that listens at `url`. Raises `EndpointTaken`, `RedisUnfit`, `RedisAway`."""
    if url.startswith(REDIS):
        from .redis_channel import RedisServerChannel  # takes time to load

        return RedisServerChannel(url)
    from .zeromq_channel import ZeroMQServerChannel

    return ZeroMQServerChannel(url)
