"""Transport through a relay, for machines that can only dial out: ZeroMQ with CURVE, over a link.

A process is met there under the public key of its broker or of its queues, which its address ends with.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from stageline.broker.control.channel import ClientChannel, Envelope, Received, ServerChannel
from stageline.broker.errors import AddressUnusable, BadKey
from stageline.broker.keys.admission import ServerKeys
from stageline.broker.keys.join_line import keyed, split_key
from stageline.broker.keys.pairs import KeyPair
from stageline.broker.transports.base import Backend, key_expected, place_of
from stageline.pipeline.addresses import masked

from .relay_address import LOCAL, SCHEME, RelayAddress, port_of

if TYPE_CHECKING:
    from stageline.broker.queues.base import WorkerQueues
    from stageline.broker.queues.ends import QueueOptions

    from .relay_link import RelayLink

_EXAMPLE = "relay://k1.hSDwCYkwp1R0i33ctD73Wg2_Og0mOBr066SpjqqbTmo:AAECAwQFBgcICQoLDA0ODw@relay.example:7443"


class RelayBackend(Backend):
    """Transport through a relay: each process dials out, and none listens for others."""

    schemes: ClassVar[Mapping[str, str]] = {"relay": _EXAMPLE}
    is_shared = invites = carries_control = True

    def fault(self, url: str) -> str | None:
        """Return why `url` is not a valid address of a relay, or of a process at one; None if it is valid."""
        try:
            _parse(url)
        except BadKey as error:
            return str(error)
        return None

    def crosses(self, url: str) -> bool:
        """Return True: a relay carries nothing without keys."""
        return True

    def open_queues(
        self, url: str, run: str, incarnation: int, options: "QueueOptions", *, folder: Path, since: int = 0
    ) -> "WorkerQueues":
        """Open the queue ends of one worker, as `Backend.open_queues`."""
        from .relay_queues import RelayQueues

        return RelayQueues(run, incarnation, _address(url), options)

    def open_client(self, url: str, pair: KeyPair | None = None, *, keeps: bool = False) -> ClientChannel:
        """Return a connection to the broker at `url`, as `Backend.open_client`."""
        from .curve import client_of
        from .relay_link import RelayLink
        from .zeromq_channel import ZeroMQClientChannel

        address, key = key_expected(url, pair)
        if pair is None or key is None:
            raise AddressUnusable(f"cannot use {masked(url)}: it does not end with the key of the broker, #k1.<key>")
        with ExitStack() as opened:
            link = RelayLink(_address(address), pair)
            opened.callback(link.close)
            channel = ZeroMQClientChannel(link.dial(key), client_of(pair, key), keeps=keeps)
            opened.pop_all()
        return RelayClientChannel(link, channel)

    def open_server(self, url: str, keys: ServerKeys | None = None) -> ServerChannel:
        """Return the channel of a broker at the relay `url`, as `Backend.open_server`."""
        from .curve import server_of
        from .relay_link import RelayLink
        from .zeromq_channel import ZeroMQServerChannel

        place = place_of(url, keys)
        address = _address(place)
        if keys is None:
            raise AddressUnusable(f"cannot listen at {masked(url)}: a broker at a relay needs keys, and has none")
        with ExitStack() as opened:
            link = RelayLink(address, keys.pair)
            opened.callback(link.close)
            channel = ZeroMQServerChannel(LOCAL, server_of(keys))
            opened.callback(channel.close)
            link.listen(port_of(channel.endpoint), 0).result()
            opened.pop_all()
        return RelayServerChannel(link, channel, keyed(address.url, keys.pair.public))

    def check_server(self, url: str) -> str:
        """Return a sentence about the relay at `url`. Raises `AddressUnusable` if it cannot be reached or refuses."""
        from .relay_link import RelayLink

        address = _address(url)
        with closing(RelayLink(address, KeyPair.generate())) as link:
            link.listen(0, 0).result()
        return f"the relay {address.place} is there"


class RelayClientChannel:
    """`ClientChannel` to a broker at a relay."""

    def __init__(self, link: "RelayLink", channel: ClientChannel) -> None:
        """Make `channel`, which dials the broker at an address of `link`, tell of the link's troubles."""
        self._link, self._channel = link, channel
        self.send: Callable[[bytes], bool] = channel.send
        self.receive: Callable[[float], bytes | None] = channel.receive
        self.renewed: Callable[[], bool] = channel.renewed

    @property
    def trouble(self) -> str:
        """The reason why the relay, or the broker there, cannot be reached; "" if none is known."""
        return self._link.trouble

    @property
    def refusal(self) -> str:
        """The reason why the broker gives no connection, as `ClientChannel.refusal`."""
        return self._channel.refusal

    def close(self) -> None:
        """Close the connection, after half a second at most for what is on its way out."""
        self._channel.close()
        self._link.close()


class RelayServerChannel:
    """`ServerChannel` of a broker at a relay."""

    def __init__(self, link: "RelayLink", channel: ServerChannel, endpoint: str) -> None:
        """Let `channel` tell of the link's troubles.

        Args:
            link: RelayLink by which those who dial the broker's key reach the channel.
            channel: Channel that listens at a port of 127.0.0.1.
            endpoint: Keyed address of the broker at the relay.
        """
        self._link, self._channel = link, channel
        self.endpoint = endpoint
        self.key_of: Callable[[bytes], str] = channel.key_of
        self.trust: Callable[[bytes], None] = channel.trust
        self.readmit: Callable[[], None] = channel.readmit
        self.send: Callable[[Iterable[Envelope]], None] = channel.send

    def receive(self, timeout: float) -> Sequence[Received] | None:
        """Return what has arrived, as `ServerChannel.receive`: None while the broker is not at the relay."""
        found = self._channel.receive(timeout)
        return found if found or self._link.absence is None else None

    def close(self) -> None:
        """Leave the relay, after a second at most for what is on its way out."""
        self._channel.close()
        self._link.close()


def _parse(url: str) -> RelayAddress:
    return RelayAddress.parse(split_key(url)[0])


def _address(url: str) -> RelayAddress:
    """Return the relay in an address of a plan. Raises `AddressUnusable`."""
    try:
        address = _parse(url)
    except BadKey as error:
        raise AddressUnusable(f"cannot use {masked(url)}: {error}") from error
    if not address.secret:
        raise AddressUnusable(f"cannot use {masked(url)}: it has no secret, as {SCHEME}k1.<key>:<secret>@host:port has")
    return address
