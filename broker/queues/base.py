"""Interfaces of a queue's two ends, which each transport implements in its own way.

A queue is a retained, ordered log from the one worker that produces its messages to the one that consumes them.
Its messages are numbered 0, 1, ... over the whole run, as `Queue.number` says. A transport is given the `Queue` as
data; on the wire the queue's name stands for it.
"""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from stageline.broker.codec.message import Message
from stageline.broker.control.messages import StepDigest
from stageline.broker.control.queue_counts import Depth, Intake
from stageline.pipeline.program import Queue
from stageline.pipeline.tree import Tree

from .log import UNLIMITED
from .secrets import QueueSecrets
from .spill import LoggedFrames


@dataclass(frozen=True, slots=True)
class Trouble:
    """Reason, for people, why messages do not move now; it holds since `since` (monotonic, in seconds)."""

    reason: str
    since: float


class Outbound(Protocol):
    """Producer's end of a queue."""

    queue: Queue

    def put(self, message: Message) -> None:
        """Retain `message` until it is trimmed, and deliver it.

        Two messages of the same identity count as one. The tensors of `message` must not be written to afterwards. The
        first message put begins a step, not necessarily step 0.

        Raises:
            Disagreement: A message of the same identity was put before with other bits.
            QueueGap: `message` skips a number.
            Unsendable: The payload cannot travel.
            QueueFull: There is no room for `message`, and waiting brings none.
            Overwritten: A tensor of a retained message was found to have been written to after it was put.
        """

    def has_credit(self, number: int, timeout: float) -> bool:
        """Return True if the consumer has granted message `number`; wait up to `timeout` seconds for the grant.

        The message need not have been put yet. Within a worker all messages are granted. A message may be put without
        credit: the producer retains it, and sends it once it is granted.
        """

    def trim(self, step: int) -> None:
        """Allow messages before `step` to be forgotten: no stage will need them again.

        Raises `Overwritten` if a tensor of one of these messages was written to after it was put.
        """

    def empty(self, step: int, rest: Tree = None) -> None:
        """Drop the content of the messages of `step`, which is not needed again.

        The messages keep their numbers and their checksums, and `rest` becomes their content. A message of `step` that
        has not been put yet is not affected.

        Args:
            step: Step whose messages are emptied.
            rest: Content that is still needed. Has no tensors.

        Raises:
            Overwritten: A tensor of one of these messages was written to after it was put.
        """

    def checksums(self, step: int) -> tuple[int, ...]:
        """Return the CRC-32 of each tensor of the retained messages of `step`, in order."""

    def depth(self) -> Depth:
        """Return the queue's content and positions for inspection; does not disturb delivery."""

    @property
    def held(self) -> range:
        """Numbers of the retained messages. Safe to read from any thread."""

    def look(self, number: int, room: int = UNLIMITED) -> LoggedFrames | None:
        """Return the frames of message `number` as they are now; None if it is not retained.

        Of one on the disk with more than `room` bytes, only the first frame is read. Safe to call from any thread: it
        neither waits nor makes anything wait.
        """

    def peek(self, limit: int) -> list[Message]:
        """Return the first `limit` retained messages; does not disturb delivery."""


class Inbound(Protocol):
    """Consumer's end of a queue."""

    queue: Queue

    def take(self, timeout: float) -> Message | None:
        """Return the next message in order, or None after `timeout` seconds.

        With a `timeout` of 0 the call does not wait. An absent producer is not an error.

        Raises:
            Disagreement: A message came twice with different bits.
            QueueGap: The producer has forgotten the next message.
            Fenced: A newer incarnation takes from the queue.
            BadMessage: A message arrives damaged again and again.
            ForeignMessage: A message is of another run, plan or wire version.
        """

    def rewind(self, step: int) -> None:
        """Deliver again from the first message of `step` on. A replacement calls this first."""

    def intake(self) -> Intake:
        """Return the positions of this end for inspection; does not disturb delivery."""


class Queues(Protocol):
    """Ends of all queues of one worker."""

    def outbound(self, queue: Queue) -> Outbound:
        """Return the producer's end of `queue`; the first call makes it."""

    def inbound(self, queue: Queue) -> Inbound:
        """Return the consumer's end of `queue`; the first call makes it."""

    def pump(self, timeout: float) -> None:
        """Serve the requests of the other ends (credit, resends), waiting up to `timeout` seconds for one."""

    def close(self) -> None:
        """Close all ends, which raise `QueueClosed` afterwards. Closing twice has the effect of closing once."""


class WorkerQueues(Queues, Protocol):
    """Queue ends of one worker among several processes."""

    def opened(self, name: str) -> Outbound | None:
        """Return the producer's end of the queue `name`, if it was made. Safe to call from any thread."""

    @property
    def digests(self) -> deque[StepDigest]:
        """Digests of each step's messages that these ends have put to a server or taken from it.

        Another thread removes them for the broker, which compares the digests of both ends.
        """

    @property
    def endpoint(self) -> str:
        """Address at which other workers find these ends, or a name for the place where all workers meet."""

    @property
    def trouble(self) -> Trouble | None:
        """Reason for which messages do not move; None if no reason is known. Safe to read from any thread."""

    def connect(self, peers: Mapping[Queue, str]) -> None:
        """Take each queue in `peers` from its producer's endpoint from now on."""

    def admit(self, newest: int) -> None:
        """Let requests of an incarnation above `newest` wait: no worker of the run has a higher one yet."""

    def rekey(self, secrets: QueueSecrets) -> None:
        """Use other secrets from now on: those of the worker's place have changed. What was put is not lost."""

    def ring(self) -> None:
        """Wake a caller that waits in `take` or `pump`. Safe to call from any thread and from a signal handler."""
