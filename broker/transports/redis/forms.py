"""Form of what a queue's ends put into Redis: as it is, or sealed with the secret of the queue.

    PlainForm     header and tensors as their codec makes them; announcements in words
    SealedForm    both sealed by `broker.keys.sealing`, and digests keyed: the server learns sizes, times and numbers

A sealed queue takes nothing that is not sealed. What cannot be opened is damaged, and is read or put again.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import ClassVar

from stageline.broker.codec.message import LIMITS, Frame, Header, Message, allocate, assemble, complete, read_header
from stageline.broker.errors import BadMessage
from stageline.broker.keys.sealing import OpenedMessage, Purpose, Sealing, pour_into, sealed_size
from stageline.pipeline.program import Queue, QueueName

COPIED = 2**16  # bytes of a sealed message that is copied once more: to make its memory first takes longer
FORMER = 0  # incarnation in the header of a message of an ended life of the run: one before every worker's


class Content(ABC):
    """Content of a message that lies in Redis, of which the `header` has been read."""

    header: Header

    @abstractmethod
    def message(self, data: Sequence[bytes]) -> Message:
        """Return the message whose tensors are in `data`. Raises `BadMessage` if they are damaged."""


class Announcement(ABC):
    """Form of the announcements of one end of a queue."""

    @abstractmethod
    def close(self, number: int, entry_id: bytes, text: bytes) -> bytes:
        """Return what is put into the stream for `text`.

        Args:
            number: Number of a message that the end has to do with.
            entry_id: Id of the entry.
            text: Text of the announcement.
        """

    @abstractmethod
    def open(self, entry_id: bytes, said: bytes) -> bytes:
        """Return the text of what lies in the stream under this id. Raises `BadMessage` if it cannot be opened."""


class EntryForm(ABC):
    """Form of the messages of one queue, and of its announcements.

    Attributes:
        longest: Bytes of the tensors of a message, as they lie in Redis, at most.
        kept: Form of the announcements of the producer.
        taken: Form of the announcements of the consumer.
    """

    longest: ClassVar[int]
    kept: Announcement
    taken: Announcement

    @abstractmethod
    def close(self, number: int, frames: Sequence[Frame]) -> Sequence[Frame]:
        """Return the frames of message `number` as they are put into the stream."""

    @abstractmethod
    def open(self, number: int, header: Frame) -> Content:
        """Return the content of a message with this header. Raises `BadMessage` if the header is damaged."""

    @abstractmethod
    def digest_key(self, step: int) -> bytes:
        """Return the key for the digest of a step's messages; empty if digests need none."""

    @abstractmethod
    def digest_mark(self, step: int) -> str:
        """Return the end of a digest, which tells keys apart: only digests with the same one are compared."""


class PlainContent(Content):
    """Content of a message that lies in Redis as its codec makes it."""

    def __init__(self, header: Header) -> None:
        """Begin with the header that has been read."""
        self.header = header

    def message(self, data: Sequence[bytes]) -> Message:
        """Return the message whose tensors are in `data`. Raises `BadMessage` if they are damaged."""
        if list(map(len, data)) == [tensor.nbytes for tensor in self.header.tensors]:  # a piece for each
            return complete(self.header, data)
        buffers = allocate(self.header)
        pour(data, buffers)
        return assemble(self.header, buffers)


class PlainAnnouncement(Announcement):
    """Announcements in words."""

    def close(self, number: int, entry_id: bytes, text: bytes) -> bytes:
        """Return the text."""
        return text

    def open(self, entry_id: bytes, said: bytes) -> bytes:
        """Return what lies in the stream."""
        return said


PLAIN_ANNOUNCEMENT = PlainAnnouncement()


class PlainForm(EntryForm):
    """Messages as their codec makes them."""

    longest = LIMITS.message_bytes
    kept = taken = PLAIN_ANNOUNCEMENT

    def close(self, number: int, frames: Sequence[Frame]) -> Sequence[Frame]:
        """Return the frames."""
        return frames

    def open(self, number: int, header: Frame) -> Content:
        """Return the content of a message with this header. Raises `BadMessage` if the header is damaged."""
        return PlainContent(read_header(header))

    def digest_key(self, step: int) -> bytes:
        """Return no key."""
        return b""

    def digest_mark(self, step: int) -> str:
        """Return no mark."""
        return ""


PLAIN = PlainForm()


class SealedContent(Content):
    """Content of a message of which the header is open, and the tensors are sealed."""

    def __init__(self, opened: OpenedMessage) -> None:
        """Read the header. Raises `BadMessage` if it is damaged."""
        self.header = read_header(opened.header)
        self._opened = opened

    def message(self, data: Sequence[bytes]) -> Message:
        """Return the message whose tensors are in `data`. Raises `BadMessage` if they cannot be opened."""
        if len(data) == 1 and len(data[0]) <= COPIED:
            size = sum(tensor.nbytes for tensor in self.header.tensors)
            return PlainContent(self.header).message([self._opened.whole(data[0], size)])
        buffers = allocate(self.header)
        self._opened.fill(buffers, data)
        return assemble(self.header, buffers)


class FormerContent(Content):
    """Content of a message that was sealed in another life of the keys, with a secret that is not known here."""

    def __init__(self, run: str, queue: QueueName, number: int) -> None:
        """Make a header whose incarnation is before that of every worker."""
        self.header = Header(run, queue, number, FORMER, None, ())

    def message(self, data: Sequence[bytes]) -> Message:
        """Return a message without content, which no worker takes."""
        return assemble(self.header, ())


class SealedAnnouncement(Announcement):
    """Announcements of one end of `queue`, which only the other end can open."""

    def __init__(self, sealing: Sealing, queue: Queue, purpose: Purpose) -> None:
        """Seal with the secrets of `sealing`, for `purpose`."""
        self._sealing = sealing
        self._queue = queue
        self._purpose = purpose

    def close(self, number: int, entry_id: bytes, text: bytes) -> bytes:
        """Return the text, sealed."""
        return self._sealing.seal_text(self._purpose, self._queue.at(number)[0], entry_id, text)

    def open(self, entry_id: bytes, said: bytes) -> bytes:
        """Return the text of what lies in the stream under this id. Raises `BadMessage` if it cannot be opened."""
        return self._sealing.open_text(self._purpose, entry_id, said)


class SealedForm(EntryForm):
    """Messages of `queue` of a run, sealed."""

    longest = sealed_size(LIMITS.message_bytes)

    def __init__(self, run: str, queue: Queue, sealing: Sealing) -> None:
        """Seal with the secrets of `sealing`."""
        self.kept = SealedAnnouncement(sealing, queue, Purpose.KEPT)
        self.taken = SealedAnnouncement(sealing, queue, Purpose.TAKEN)
        self._run = run
        self._queue = queue
        self._sealing = sealing

    def close(self, number: int, frames: Sequence[Frame]) -> Sequence[Frame]:
        """Return the frames of message `number`, sealed with a key of their own."""
        return self._sealing.seal(self._queue.at(number)[0], number, frames)

    def open(self, number: int, header: Frame) -> Content:
        """Return the content of a message with this sealed header. Raises `BadMessage` if it cannot be opened."""
        opened = self._sealing.open(self._queue.at(number)[0], number, header)
        return FormerContent(self._run, self._queue.name, number) if opened is None else SealedContent(opened)

    def digest_key(self, step: int) -> bytes:
        """Return a key, so that a digest outside the seal tells nothing about messages that can be guessed."""
        return self._sealing.secret_at(step).key(Purpose.DIGESTS)

    def digest_mark(self, step: int) -> str:
        """Return the life of the queue's keys."""
        return f"{self._sealing.secret_at(step).context.life:x}"


def form_of(
    run: str, queue: Queue, sealing_of: Callable[[Queue], Sealing] | None, *, is_padded: bool = False
) -> EntryForm:
    """Return the form of a queue.

    Args:
        run: Id of the run.
        queue: Queue as the program has it.
        sealing_of: Returns how the ends of a queue seal; None if nothing is sealed.
        is_padded: True to hide lengths of what is sealed.
    """
    if sealing_of is None:
        return PLAIN
    sealing = sealing_of(queue)
    return SealedForm(run, queue, replace(sealing, is_padded=True) if is_padded else sealing)


def pour(data: Sequence[bytes], buffers: Sequence[memoryview]) -> None:
    """Fill the buffers, one after another, with the data. Raises `BadMessage` if it is too much or too little."""
    if sum(map(len, data)) != sum(buffer.nbytes for buffer in buffers):
        raise BadMessage(f"{sum(map(len, data))} bytes came for tensors of {sum(b.nbytes for b in buffers)} bytes")
    rest = [buffer for buffer in reversed(buffers) if buffer.nbytes]
    for piece in data:
        pour_into(rest, piece)
