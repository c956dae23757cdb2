"""The promise of a queue; each transport keeps it in its own way.

A queue is a retained, ordered log from the one worker that produces its messages to the one that consumes them.
Its messages are numbered 0, 1, ... over the whole run, as `Queue.number` says. A transport is given the `Queue` as
data; on the wire its name stands for it.
"""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from stageline.broker.codec.message import Message
from stageline.broker.control.messages import StepDigest
from stageline.pipeline.program import Queue
from stageline.pipeline.tree import Tree


@dataclass(frozen=True, slots=True)
class Depth:
    """The content of a queue now. Counts are messages; `oldest` is the age in seconds of the oldest retained one."""

    ready: int  # put and not yet sent to the consumer
    in_flight: int  # sent, and not yet known to have arrived
    retained: int  # kept for a rewind, the ones above included
    bytes: int  # of the retained ones
    oldest: float


@dataclass(frozen=True, slots=True)
class Trouble:
    """Why messages do not move now, for people, and since when (monotonic, in seconds)."""

    reason: str
    since: float


class Outbound(Protocol):
    """The producer's end of a queue."""

    queue: Queue

    def put(self, message: Message) -> None:
        """Keep `message` until it is trimmed, and deliver it. The same identity twice is one message.

        Its tensors must not be written to afterwards. The first message put begins a step, not necessarily step 0.
        Raises `Disagreement` if a message of the same identity has other bits, `QueueGap` if it skips a number,
        `Unsendable` if it cannot travel, `QueueFull` if there is no room for it and waiting brings none.
        """

    def has_credit(self, number: int, timeout: float) -> bool:
        """Return True if the consumer has granted message `number`, which need not be there yet; wait up to `timeout`
        seconds for that. Within a worker all are granted. A message may be put without: it is retained, and sent
        later."""

    def trim(self, step: int) -> None:
        """Allow messages before `step` to be forgotten: no stage will need them again.

        Raises `Overwritten` if a tensor of one was written to after it was put.
        """

    def empty(self, step: int, rest: Tree = None) -> None:
        """The content of the messages of `step` is not needed again; they keep their numbers, their checksums, and
        `rest`, which has no tensors. A message that has not been put yet stays as it is.

        Raises `Overwritten` if a tensor of one was written to after it was put.
        """

    def checksums(self, step: int) -> tuple[int, ...]:
        """The CRC-32 of each tensor of the retained messages of `step`, in order."""

    def depth(self) -> Depth:
        """Return the content for inspection; does not disturb delivery."""

    def peek(self, limit: int) -> list[Message]:
        """The first `limit` retained messages; does not disturb delivery."""


class Inbound(Protocol):
    """The consumer's end of a queue."""

    queue: Queue

    def take(self, timeout: float) -> Message | None:
        """The next message in order, or None after `timeout` seconds (0: does not wait).

        An absent producer is not an error. Raises `Disagreement` if a message came twice with different bits,
        `QueueGap` if the next one was forgotten, `Fenced` if a newer incarnation takes from the queue, `BadMessage`
        if a message arrives damaged again and again, `ForeignMessage` if it is of another run, plan or wire version.
        """

    def rewind(self, step: int) -> None:
        """Deliver again from the first message of `step` on. A replacement calls this first."""


class Queues(Protocol):
    """All queue ends of one worker."""

    def outbound(self, queue: Queue) -> Outbound:
        """The producer's end of a queue, made when it is first asked for."""

    def inbound(self, queue: Queue) -> Inbound:
        """The consumer's end of a queue, made when it is first asked for."""

    def pump(self, timeout: float) -> None:
        """Serve the requests of the other ends (credit, resends), waiting up to `timeout` seconds for one."""

    def close(self) -> None:
        """Close all ends, which raise `QueueClosed` afterwards. Closing twice is closing once."""


class WorkerQueues(Queues, Protocol):
    """The queue ends of one worker among several processes."""

    @property
    def digests(self) -> deque[StepDigest]:
        """Digests of each step's messages that these ends have put to a server, or taken from there.

        Another thread takes them away, for the broker, which compares those of both ends."""

    @property
    def endpoint(self) -> str:
        """Address at which other workers find these ends, or a name for the place where all meet."""

    @property
    def trouble(self) -> Trouble | None:
        """Reason for which messages do not move, if it is known. For any thread."""

    def connect(self, peers: Mapping[Queue, str]) -> None:
        """Take each of these queues from its producer's endpoint, from now on."""

    def admit(self, newest: int) -> None:
        """No worker of the run has a higher incarnation than `newest`, from now on: a request of a higher one waits."""

    def ring(self) -> None:
        """Wake a caller that waits in `take` or `pump`. For any thread, and for signal handlers."""
