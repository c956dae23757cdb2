"""The queues of one worker: sockets and streams are simulated connections; what decides, the logs and the local queues
are the product's.
"""

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial

from simulation.environment import RUN, Environment
from simulation.network import Connection
from simulation.process import SimulatedProcess, VirtualWakeup
from stageline.broker.codec.message import (
    Frame,
    Message,
    assemble,
    check_run,
    fingerprint,
    read_header,
)
from stageline.broker.control.queue_counts import Depth
from stageline.broker.queues.delivery import Receiver, Sender
from stageline.broker.queues.ends import Found, QueueEnds, QueueOptions
from stageline.broker.queues.log import Log
from stageline.broker.queues.requests import CreditRequest, Requester, RetentionReply, reply_to
from stageline.broker.queues.secrets import QueueSecrets
from stageline.pipeline.program import Queue

RECONNECT = 0.05  # seconds between two attempts
REKEYED = "a running worker takes over other keys"
UNSEALED = "a request with another key is refused"
AHEAD = "a stage that runs forward only is as far ahead as it may be"

# A request or reply, with the key that seals it; or a message: its header, which holds all, and whether it is whole.
Item = tuple[CreditRequest | RetentionReply, bytes] | tuple[Frame, bool]


@dataclass(eq=False)
class Peer:
    """A connection to the producers at `endpoint`, made again whenever it is broken."""

    endpoint: str
    requesters: dict[str, Requester] = field(default_factory=dict)
    connection: Connection | None = None


class SimulatedQueues(QueueEnds):
    """`WorkerQueues` of `process`, which others find at `endpoint`."""

    trouble = None

    def __init__(
        self,
        process: SimulatedProcess,
        environment: Environment,
        endpoint: str,
        incarnation: int,
        options: QueueOptions,
    ) -> None:
        super().__init__(RUN, incarnation, options)
        self.process = process
        self.endpoint = endpoint
        self.wakeup = VirtualWakeup(process)
        self.ring = self.wakeup.set
        self.received: deque[tuple[Connection, Item]] = deque()
        self._environment = environment
        self.fired = environment.fired
        self._newest = 0  # incarnation of the run's workers; what a higher one requests, it requests again
        self._senders: dict[str, Sender] = {}
        self._requesters: dict[str, Requester] = {}
        self._peers: dict[str, Peer] = {}
        self._peer_of: dict[Connection, Peer] = {}
        self._connections: dict[bytes, Connection] = {}  # by name, as the producers know their peers
        self._others: dict[Connection, SimulatedQueues] = {}
        environment.bound[endpoint] = self

    def connect(self, peers: Mapping[Queue, str]) -> None:
        for queue, endpoint in peers.items():
            self.inbound(queue)
            requester = self._requesters[queue.name]
            for peer in self._peers.values():
                peer.requesters.pop(queue.name, None)
            self._peers.setdefault(endpoint, Peer(endpoint)).requesters[queue.name] = requester
            requester.introduce()
        self._peers = {endpoint: peer for endpoint, peer in self._peers.items() if peer.requesters}
        self._request()

    def admit(self, newest: int) -> None:
        self._newest = newest

    def rekey(self, secrets: QueueSecrets) -> None:
        self.options = replace(self.options, secrets=secrets)
        self.fired[REKEYED] += 1

    def pump(self, timeout: float) -> None:
        self.serve()
        if timeout > 0:
            self.wakeup.wait(min(timeout, self._due() - self.process.clock.now))
            self.serve()

    def wait_for(self, look: Callable[[], Found | None], timeout: float) -> Found | None:
        """Result of `look` within `timeout` seconds."""
        deadline = self.process.clock.now + timeout
        while True:
            self.serve()
            message = look()
            left = min(deadline, self._due()) - self.process.clock.now
            if message is not None or self.process.clock.now >= deadline:
                return message
            self.wakeup.wait(left)

    def arrive(self, connection: Connection, item: Item) -> None:
        self.received.append((connection, item))
        self.ring()

    def serve(self) -> None:
        """Takes in all that has come, and sends what is due."""
        while self.received:
            connection, item = self.received.popleft()
            match item:
                case CreditRequest() as request, bytes() as key if self._is_sealed(request, key):
                    self._answer(connection, request)
                case RetentionReply() as reply, bytes() as key if self._is_sealed(reply, key):
                    self._take_answer(connection, reply)
                case bytes() as frame, bool() as whole:
                    self._take_message(connection, frame, whole)
        for sender in self._senders.values():
            self.flush(sender)
        self._request()

    def flush(self, sender: Sender) -> None:
        while (number := sender.due()) is not None:
            assert sender.route is not None
            connection = self._connections[sender.route]
            if connection.broken:
                sender.route = None
                return
            self._send(connection, (sender.frames(number)[0], number >= sender.received))
            sender.mark_sent(number)

    def _request(self) -> None:
        now = self.process.clock.now
        for peer in self._peers.values():
            for requester in peer.requesters.values():
                request = requester.request(now)
                if request is not None and self._send_to(peer, request):
                    requester.mark_sent(request, now)

    def _due(self) -> float:
        """When to look again though nothing has come."""
        now = self.process.clock.now
        connected = [each for peer in self._peers.values() for each in peer.requesters.values()]
        if any(each.receiver.must_report or each.due <= now for each in connected):  # its producer could not be reached
            return now + RECONNECT
        return min((each.due for each in connected), default=float("inf"))

    def _answer(self, connection: Connection, request: CreditRequest) -> None:
        sender = self._senders.get(request.queue)
        if sender is None or request.incarnation > self._newest:  # a former process at this endpoint had another place
            return
        self._connections[connection.name] = connection
        sender.update(request.to_credit(), connection.name)
        self.flush(sender)
        if request.ask:
            self._send_sealed(connection, reply_to(request, sender))

    def _take_answer(self, connection: Connection, answer: RetentionReply) -> None:
        requester = self._requester(connection, answer.queue)
        if requester is not None:
            requester.receive(answer)

    def _take_message(self, connection: Connection, frame: Frame, whole: bool) -> None:
        header = read_header(frame)
        check_run(header, RUN)
        requester, marks = self._requester(connection, header.queue), fingerprint(header)
        if requester is not None and requester.receiver.accepts(header.number, marks, whole=whole):
            requester.receiver.accept(assemble(header, []), marks)
            requester.postpone(self.process.clock.now)

    def _requester(self, connection: Connection, queue: str) -> Requester | None:
        """The requester of the queue of this name; None if it came over a connection that was given up."""
        peer = self._peer_of[connection]
        return peer.requesters.get(queue) if self._peers.get(peer.endpoint) is peer else None

    def _send_to(self, peer: Peer, request: CreditRequest) -> bool:
        if peer.connection is None or peer.connection.broken:
            peer.connection = self._connect(peer)
        if peer.connection is not None:
            self._send_sealed(peer.connection, request)
        return peer.connection is not None

    def _connect(self, peer: Peer) -> Connection | None:
        there = self._environment.bound.get(peer.endpoint)
        connection = self._environment.network.connect(self.process, there.process) if there else None
        if there is not None and connection is not None:
            self._peer_of[connection] = peer
            self._others[connection], there._others[connection] = there, self
        return connection

    def _is_sealed(self, request: CreditRequest | RetentionReply, key: bytes) -> bool:
        known = self.options.secrets.requests.get(request.queue) == key
        self.fired[UNSEALED] += not known
        return known

    def _send_sealed(self, connection: Connection, request: CreditRequest | RetentionReply) -> None:
        self._send(connection, (request, self.options.secrets.requests[request.queue]))

    def _send(self, connection: Connection, item: Item) -> None:
        other = self._others[connection]
        arrive = partial(other.arrive, connection, item)
        self._environment.network.carry(connection, other.process, arrive, doubtful=True)

    def _serve(self, seconds: float) -> None:
        """Never needed: memory for messages is never full here."""

    def _new_outbound(self, log: Log) -> "SimulatedOutbound":
        self._senders[log.queue.name] = Sender(log)
        return SimulatedOutbound(self, self._senders[log.queue.name])

    def _new_inbound(self, receiver: Receiver) -> "SimulatedInbound":
        self._requesters[receiver.name] = Requester(RUN, self.incarnation, receiver)
        return SimulatedInbound(self, self._requesters[receiver.name])


class SimulatedOutbound:
    """The producer's end of a queue."""

    def __init__(self, queues: SimulatedQueues, sender: Sender) -> None:
        self.queue = sender.log.queue
        self.trim = sender.log.trim
        self.empty = sender.log.empty
        self.checksums = sender.log.checksums
        self._queues = queues
        self._sender = sender

    def put(self, message: Message) -> None:
        self._sender.log.put(message, self._queues.process.clock.now)
        self._queues.flush(self._sender)

    def has_credit(self, number: int, timeout: float) -> bool:
        granted = bool(self._queues.wait_for(lambda: number < self._sender.limit or None, timeout))
        self._queues.fired[AHEAD] += not granted and self._sender.limit > 0
        return granted

    def depth(self) -> Depth:
        return self._sender.depth(self._queues.process.clock.now)


class SimulatedInbound:
    """The consumer's end of a queue."""

    def __init__(self, queues: SimulatedQueues, requester: Requester) -> None:
        self.queue = requester.receiver.queue
        self.intake = requester.receiver.intake
        self.requester = requester
        self._queues = queues

    def take(self, timeout: float) -> Message | None:
        receiver = self.requester.receiver
        return self._queues.wait_for(lambda: receiver.pop() if receiver.ready else None, timeout)

    def rewind(self, step: int) -> None:
        self.requester.rewind(self.queue.first(step))
