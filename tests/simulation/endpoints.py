"""The queue ends of one worker: what `broker.queues.router` and `dealer` do, over simulated lines.

The deciding ends, the logs and the local queues are the real ones.
"""

from collections import deque
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial

from simulation.clock import Deed
from simulation.network import Line, Network
from simulation.process import Process
from stageline.broker.codec.message import Frame, Message, assemble, check_run, fingerprint, read_header
from stageline.broker.queues.base import QueueKey
from stageline.broker.queues.log import Log, RetentionBudget
from stageline.broker.queues.memory import MemoryQueue
from stageline.broker.queues.receiver import Receiver
from stageline.broker.queues.sender import Sender
from stageline.broker.queues.zeromq.requests import CreditRequest, Requester, RetentionReply, reply_to
from stageline.pipeline.numbering import message_number

RECONNECT = 0.05  # seconds between two attempts

# A message: its header, which holds all, and whether it counts as whole.
Item = CreditRequest | RetentionReply | tuple[Frame, bool]


@dataclass(eq=False)
class Dealer:
    """A connection to the producers at `endpoint`, made again whenever it is broken."""

    endpoint: str
    consumers: dict[QueueKey, Requester] = field(default_factory=dict)
    line: Line | None = None


class Ends:
    """`bound`: whose ends are to be found at which endpoint, of all processes."""

    def __init__(
        self,
        process: Process,
        network: Network,
        bound: dict[str, "Ends"],
        *,
        run: str,
        incarnation: int,
        microbatches: int,
        window: int,
        local: Collection[QueueKey],
    ) -> None:
        self.process = process
        self.ring: Deed = lambda: None
        self.mail: deque[tuple[Line, Item]] = deque()
        self.producers: dict[QueueKey, Sender] = {}
        self._network = network
        self._bound = bound
        self._run = run
        self._incarnation = incarnation
        self._microbatches = microbatches
        self._window = window
        self._local = local
        self._consumers: dict[QueueKey, Requester] = {}
        self._loops: dict[QueueKey, MemoryQueue] = {}
        self._dealers: dict[str, Dealer] = {}
        self._dealer_of: dict[Line, Dealer] = {}
        self._lines: dict[bytes, Line] = {}  # by name, as the producers know their peers
        self._peers: dict[Line, Ends] = {}

    def open(self, takes: Iterable[QueueKey], gives: Iterable[QueueKey]) -> None:
        for key in gives:
            if key in self._local:
                self._loops[key] = MemoryQueue(self._log(key), self._microbatches)
            else:
                self.producers[key] = Sender(self._log(key))
        for key in takes:
            if key not in self._local:
                self._consumers[key] = Requester(self._run, self._incarnation, Receiver(key, self._window))

    def put(self, key: QueueKey, message: Message, now: float) -> None:
        if key in self._loops:
            self._loops[key].put(message)
            return
        self.producers[key].log.put(message, now)
        self.flush(self.producers[key])

    def take(self, key: QueueKey) -> Message | None:
        if key in self._loops:
            return self._loops[key].take(0)
        consumer = self._consumers[key].receiver
        return consumer.pop() if consumer.ready else None

    def rewind(self, step: int) -> None:
        for consumer in self._consumers.values():
            consumer.rewind(step * self._microbatches)
        for loop in self._loops.values():
            loop.rewind(step)

    def trim(self, step: int) -> None:
        for loop in self._loops.values():
            loop.trim(step)
        for producer in self.producers.values():
            producer.log.trim(step)

    def retained(self) -> dict[QueueKey, int]:
        """How many messages are kept, by queue."""
        loops = {key: loop.depth().retained for key, loop in self._loops.items()}
        return loops | {key: len(producer.log) for key, producer in self.producers.items()}

    def connect(self, endpoints: Mapping[QueueKey, str]) -> None:
        for key, endpoint in endpoints.items():
            for dealer in self._dealers.values():
                dealer.consumers.pop(key, None)
            dealer = self._dealers.setdefault(endpoint, Dealer(endpoint))
            dealer.consumers[key] = self._consumers[key]
            self._consumers[key].introduce()
        self._dealers = {endpoint: dealer for endpoint, dealer in self._dealers.items() if dealer.consumers}
        self.speak()

    def arrive(self, line: Line, item: Item) -> None:
        self.mail.append((line, item))
        self.ring()

    def serve(self) -> None:
        """Takes in all that has come, and says what is due."""
        while self.mail:
            line, item = self.mail.popleft()
            match item:
                case CreditRequest():
                    self._answer(line, item)
                case RetentionReply():
                    self._hear(line, item)
                case frame, whole:
                    self._receive(line, frame, whole)
        for producer in self.producers.values():
            self.flush(producer)
        self.speak()

    def speak(self) -> None:
        now = self.process.clock.now
        for dealer in self._dealers.values():
            for consumer in dealer.consumers.values():
                take = consumer.request(now)
                if take is not None and self._say(dealer, take):
                    consumer.mark_sent(take, now)

    def due(self, now: float) -> float:
        """When to look again though nothing has come."""
        unsaid = any(consumer.receiver.must_report or consumer.due <= now for consumer in self._consumers.values())
        if unsaid:  # nobody could be reached
            return now + RECONNECT
        return min((consumer.due for consumer in self._consumers.values()), default=float("inf"))

    def flush(self, producer: Sender) -> None:
        while (number := producer.due()) is not None:
            assert producer.route is not None
            line = self._lines[producer.route]
            if line.broken:
                producer.lose_route()
                return
            frames = producer.frames(number)
            self._send(line, (frames[0], number >= producer.received))
            producer.mark_sent(number)

    def _answer(self, line: Line, take: CreditRequest) -> None:
        producer = self.producers.get(take.key)
        if producer is None:  # its worker had another place in its former life
            return
        self._lines[line.name] = line
        producer.update(take.to_credit(), line.name)
        self.flush(producer)
        if take.ask:
            self._send(line, reply_to(take, producer))

    def _hear(self, line: Line, standing: RetentionReply) -> None:
        consumer = self._consumer(line, standing.key)
        if consumer is not None:
            consumer.receive(standing)

    def _receive(self, line: Line, frame: Frame, whole: bool) -> None:
        header = read_header(frame)
        check_run(header, self._run)
        consumer = self._consumer(line, QueueKey(header.flow, header.stage))
        number, marks = message_number(header.step, header.microbatch, self._microbatches), fingerprint(header)
        if consumer is not None and consumer.receiver.accepts(number, marks, whole=whole):
            consumer.receiver.accept(assemble(header, []), marks)
            consumer.postpone(self.process.clock.now)

    def _consumer(self, line: Line, key: QueueKey) -> Requester | None:
        """Who is to have it; nobody if it came over a connection that was given up."""
        dealer = self._dealer_of[line]
        return dealer.consumers.get(key) if self._dealers.get(dealer.endpoint) is dealer else None

    def _say(self, dealer: Dealer, take: CreditRequest) -> bool:
        if dealer.line is None or dealer.line.broken:
            dealer.line = self._connection(dealer)
        if dealer.line is not None:
            self._send(dealer.line, take)
        return dealer.line is not None

    def _connection(self, dealer: Dealer) -> Line | None:
        there = self._bound.get(dealer.endpoint)
        line = self._network.connect(self.process, there.process) if there else None
        if there is not None and line is not None:
            self._dealer_of[line] = dealer
            self._peers[line], there._peers[line] = there, self
        return line

    def _send(self, line: Line, item: Item) -> None:
        peer = self._peers[line]
        self._network.carry(line, peer.process, partial(peer.arrive, line, item), doubtful=True)

    def _log(self, key: QueueKey) -> Log:
        return Log(self._run, key, self._microbatches, RetentionBudget())
