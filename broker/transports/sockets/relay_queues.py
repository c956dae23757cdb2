"""Queues of one worker through a relay: those of ZeroMQ, whose sockets listen and dial at this machine."""

from dataclasses import replace

from stageline.broker.errors import AddressUnusable
from stageline.broker.keys.join_line import keyed
from stageline.broker.keys.pairs import KeyPair, PublicKey
from stageline.broker.queues.base import Trouble
from stageline.broker.queues.ends import QueueOptions

from .relay_address import LOCAL, SCHEME, RelayAddress, port_of
from .relay_link import RelayLink
from .zeromq_queues import ZeroMQQueues


class RelayQueues(ZeroMQQueues):
    """All queue ends of one worker, through a relay."""

    schemes = (SCHEME,)

    def __init__(self, run: str, incarnation: int, address: RelayAddress, options: QueueOptions) -> None:
        """Open the queues. A relay that cannot be reached yet is waited for, as one that is lost later.

        Args:
            run: Id of the run.
            incarnation: Incarnation of the worker; a higher one takes the place of a lower one at the relay.
            address: Address of the relay.
            options: Windows, limits, and secrets, among them keys of connections.

        Raises:
            AddressUnusable: There are no keys.
        """
        keys = options.secrets.curve
        if keys is None:
            raise AddressUnusable(
                f"queues at the relay {address.place} need keys, which a broker with keys gives to its workers: let "
                "broker.url be the relay, too, and leave broker.insecure out"
            )
        super().__init__(run, incarnation, LOCAL, options)
        self._address = replace(address, name=keys.name or address.name)
        self._link = RelayLink(self._address, keys.pair)
        self.endpoint = self._listen(keys.pair)

    @property
    def trouble(self) -> Trouble | None:
        """Reason for which this worker is not at the relay; None while it is."""
        return self._link.absence

    def close(self) -> None:
        """Close the queues, after two seconds at most for what is on its way out."""
        super().close()
        self._link.close()

    def _met_at(self, pair: KeyPair) -> str:
        former, self._link = self._link, RelayLink(self._address, pair)
        former.close()
        return self._listen(pair)

    def _listen(self, pair: KeyPair) -> str:
        """Let the relay connect those who dial the key of `pair`; return the keyed address."""
        self._link.listen(port_of(self.router.endpoint), self.incarnation)
        return keyed(self._address.shared.url, pair.public)

    def _way_to(self, address: str, server: PublicKey | None) -> str:
        assert server is not None  # noqa: S101 - there are keys
        return self._link.dial(server, RelayAddress.parse(address).name)
