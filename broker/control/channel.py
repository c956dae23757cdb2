"""The interface of a channel for control messages between the broker and its workers and commands.

    worker, command    ClientChannel.send     ------->  ServerChannel.receive    broker
                       ClientChannel.receive  <-------  ServerChannel.send

A message may get lost: a sender that needs it to arrive repeats it until it is answered.
"""

from collections.abc import Iterable, Sequence
from typing import Protocol

LARGEST = 64 * 2**20  # bytes of a message; the digests of a very large model are the longest
LARGEST_UNTRUSTED = 2**20  # bytes of a message over a connection that has brought no genuine one yet
LARGEST_UNPROVEN = 2**16  # bytes of a message that does not prove who says it: its content is looked at

Envelope = tuple[bytes, bytes]  # the address at the other end, and an encoded message
Received = tuple[bytes, bytes | None]  # likewise; None for what no client of ours can have sent


class ClientChannel(Protocol):
    """A worker's or command's connection to the broker, for use by one thread at a time."""

    @property
    def trouble(self) -> str:
        """The reason why the broker cannot be reached, or "" if none is known."""

    @property
    def refusal(self) -> str:
        """The `KeyRefusal` by what is at the broker's address, "" if none is known; may take seconds.

        Transports without keys know none.
        """

    def send(self, message: bytes) -> bool:
        """Send `message`. Returns False if there is no broker at the moment: the message is lost."""

    def receive(self, timeout: float) -> bytes | None:
        """Return the broker's next message, or None if none arrives within `timeout` seconds."""

    def renewed(self) -> bool:
        """Return True if the broker or the connection is a new one since the last call: it may not know this client."""

    def close(self) -> None:
        """Close the connection; messages sent before still go out, for half a second at most."""


class ServerChannel(Protocol):
    """The broker's end of all connections."""

    endpoint: str  # where a `ClientChannel` finds it: a keyed address if the channel has keys

    def receive(self, timeout: float) -> Sequence[Received] | None:
        """Return the messages that have arrived; wait up to `timeout` seconds for the first.

        Returns None while no client can reach the broker: then no silence of a worker counts against it.
        """

    def key_of(self, sender: bytes) -> str:
        """Return the text of the public key of `sender`, a sender in what the last `receive` brought; "" without keys.

        All messages that it brought from `sender` came over connections with this key.
        """

    def trust(self, sender: bytes) -> None:
        """Give the connection of `sender` wider limits from now on.

        Called when the messages that the last `receive` brought from `sender` were genuine.
        """

    def readmit(self) -> None:
        """Close all connections soon, so that peers dial again: call it once a key is admitted no more."""

    def send(self, envelopes: Iterable[Envelope]) -> None:
        """Send messages to their recipients. A message is lost if its recipient is gone, or too slow to take it."""

    def close(self) -> None:
        """Release the address."""
