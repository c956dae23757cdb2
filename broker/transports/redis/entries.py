"""Layout of a queue in Redis: its keys, the ids and fields of its entries, and what its ends announce.

    stageline:{RUN}:layout            string   "2": the version of all this
    stageline:{RUN}:forward-1         stream   the messages to stage 1 that may still be needed
        id     NUMBER-PLACE                    message NUMBER of the queue, its entries counted from 1
        t      milliseconds since 1970         when it was added
        d      bytes                           of the message's tensors, one after another, as often as there are pieces
        h      header                          in the last entry of a message, and only there
    stageline:{RUN}:forward-1:kept    stream   one entry: the newest announcement of its producer
        id     INCARNATION-SERIAL              the server refuses that of a replaced worker
        says   FIRST SENT                      the oldest message it still has; all before SENT are in the stream
        check  CRC-32                          of the id and what it says
    stageline:{RUN}:forward-1:taken   stream   one entry: the newest announcement of its consumer, likewise
        says   TAKEN CREDIT MISSING            all before TAKEN are taken, those before CREDIT may be added, and
                                               MISSING is not where it should be (-1: nothing is)

In a run that is sealed, the layout is "2 sealed", and d, h and says have the form of `SealedForm`.

Ids come from the place in the run, so that a message that is added twice is one message. The entries of a message are
added together or not at all. Nothing is trimmed by length, only by number. `{RUN}` keeps the keys of a run on one node.

The server refuses an id that is not beyond the newest: a worker that has been replaced gets an error, and sees the
incarnation that replaced it.

A client of the server can replace a stream by another that is as well-formed. The consumer cannot tell, but its
`StepDigests` then differ from the producer's; both are reported to the broker, which compares them.
"""

from collections import deque
from collections.abc import Callable, Hashable, Sequence
from hashlib import blake2b
from typing import Any, NamedTuple

import msgspec
from zlib_ng.zlib_ng import crc32

from stageline.broker.codec.message import Frame
from stageline.broker.codec.structure import digest_of
from stageline.broker.control.messages import StepDigest
from stageline.broker.errors import BadMessage
from stageline.broker.queues.delivery import Credit, Retention, check_current
from stageline.pipeline.program import Queue

from .answers import sound
from .forms import PLAIN, PLAIN_ANNOUNCEMENT, Announcement, EntryForm
from .units import Command

LAYOUT = 2
PIECE = 2**20  # bytes of tensors in an entry; larger and smaller ones are slower (measured, 64 KiB to 16 MiB)

_NOTHING = -1  # the entry's number for "no message is missing"
UNCOPIED = 2**13  # bytes of a frame from which on it is sent without a copy


class EntryId(NamedTuple):
    """Id of a stream's entry, `number-place`: of a message's entry, or incarnation and serial of an announcement."""

    number: int
    place: int

    def __bytes__(self) -> bytes:
        """Return the id as the server writes it, `number-place`."""
        return b"%d-%d" % self


class StreamEntry(msgspec.Struct, frozen=True):
    """Part of a message; the last part has its header."""

    id: EntryId
    data: tuple[bytes, ...]
    header: bytes | None


class Keys:
    """Keys of a queue of `run`: its `entries`, and the announcements `kept` and `taken`."""

    def __init__(self, run: str, queue: str) -> None:
        """Make the keys of the queue named `queue`."""
        name = f"{prefix(run)}{queue}"
        self.entries = name.encode()
        self.kept = f"{name}:kept".encode()
        self.taken = f"{name}:taken".encode()


def prefix(run: str) -> str:
    """Return the beginning of all keys of a run."""
    return f"stageline:{{{run}}}:"


def layout(run: str, *, is_sealed: bool = False) -> tuple[bytes, bytes]:
    """Return the key of a run's layout, and its value."""
    return f"{prefix(run)}layout".encode(), b"%d" % LAYOUT + b" sealed" * is_sealed


def last_entry(key: bytes, number: int | None = None) -> Command:
    """Return the command that asks for the last entry of a stream, or of message `number` in it."""
    ends = (b"+", b"-") if number is None else 2 * (b"%d" % number,)
    return (b"XREVRANGE", key, *ends, b"COUNT", b"1")


def read_entry(raw: Any) -> StreamEntry | None:
    """Return the entry in an answer of the server; None for an entry that is malformed."""
    try:
        id_text, [_, _, *fields] = raw
        header = fields[-1] if fields[-2:-1] == [b"h"] else None
        return StreamEntry(read_id(id_text), tuple(fields[1 : None if header is None else -2 : 2]), header)
    except (TypeError, ValueError):
        return None


def read_id(text: bytes) -> EntryId:
    """Return the id in `text`. Raises `ValueError` if it is malformed."""
    number, _, place = text.partition(b"-")
    return EntryId(int(number), int(place))


def read_credit(raw: Any, form: Announcement = PLAIN_ANNOUNCEMENT) -> Credit:
    """Return a consumer's announcement. Raises `BadMessage` if it is malformed or damaged."""
    entry_id, (received, limit, missing) = _read_announcement(raw, form, 3)
    return Credit(*entry_id, received, limit, None if missing == _NOTHING else missing)


def read_retention(raw: Any, form: Announcement = PLAIN_ANNOUNCEMENT) -> tuple[EntryId, Retention]:
    """Return a producer's announcement and its id. Raises `BadMessage` if it is malformed or damaged."""
    entry_id, (first, sent) = _read_announcement(raw, form, 2)
    return entry_id, Retention(first, sent)


class Announcer:
    """Author of one end's announcements in the stream `key`.

    Attributes:
        must_announce: True if what was announced last is not in the stream, or may not be.
        look: Command that shows what is in the stream; `check` gets the answer.
    """

    def __init__(self, key: bytes, duty: str, incarnation: int, form: Announcement = PLAIN_ANNOUNCEMENT) -> None:
        """Begin with nothing announced.

        Args:
            key: Key of the stream.
            duty: Duty that only one incarnation has: "forward-1 is taken".
            incarnation: Incarnation of this worker.
            form: Form of the announcements.
        """
        self.look = last_entry(key)
        self._form = form
        self.must_announce = True
        self._key = key
        self._duty = duty
        self._incarnation = incarnation
        self._serial = 0
        self._is_garbled = False

    def announce(self, first: int, *others: int | None) -> list[Command]:
        """Return the commands that replace the announcement in the stream. `check` gets their answers.

        Args:
            first: First of the numbers to announce, that of a message.
            others: Numbers after it, None for none.
        """
        self._serial += 1
        self.must_announce = False
        entry_id = EntryId(self._incarnation, self._serial)
        text = b" ".join(b"%d" % (_NOTHING if number is None else number) for number in (first, *others))
        said = self._form.close(first, bytes(entry_id), text)
        fields = (b"says", said, b"check", _checksum(entry_id, said))
        clear: list[Command] = [(b"DEL", self._key)] if self._is_garbled else []
        return [*clear, (b"XADD", self._key, b"MINID", b"=", bytes(entry_id), bytes(entry_id), *fields), self.look]

    def seal_with(self, form: Announcement) -> None:
        """Use another form from now on, and announce again."""
        self._form = form
        self.must_announce = True

    def repeat(self) -> None:
        """Announce again: the last announcement may not be in the stream."""
        self.must_announce = True

    def check(self, answers: Sequence[Any]) -> None:
        """Compare the last of `answers`, which is what is in the stream, with the announcement.

        Sets `must_announce` if they differ. Raises `Fenced` if a newer incarnation's is there.
        """
        (found,) = sound(list(answers[-1:]))
        try:
            there = _read_announcement(found[0], self._form)[0] if found else EntryId(0, 0)
            self._is_garbled = False
        except BadMessage:
            self.must_announce = self._is_garbled = True
            return
        check_current(self._duty, there.number, self._incarnation)
        if there != (self._incarnation, self._serial):
            self._serial = max(self._serial, there.place if there.number == self._incarnation else 0)
            self.must_announce = True


def _read_announcement(raw: Any, form: Announcement, count: int | None = None) -> tuple[EntryId, list[int]]:
    """Return the id and the numbers, `count` of them if that is given."""
    try:
        id_text, [_, said, _, check] = raw
        entry_id = read_id(id_text)
        sane = check == _checksum(entry_id, said)
        numbers = [int(number) for number in form.open(bytes(entry_id), said).split()] if sane else []
    except (TypeError, ValueError, AttributeError) as error:
        raise BadMessage(f"an entry of a stream is not an announcement: {error}") from error
    if not sane or len(numbers) != (count or len(numbers)):
        raise BadMessage(
            "an announcement is damaged: its CRC-32 does not match, or it has not as many numbers as it must"
        )
    return entry_id, numbers


def _checksum(entry_id: EntryId, said: bytes) -> bytes:
    return b"%d" % crc32(bytes(entry_id) + b" " + said)


def _parts(frames: Sequence[Frame]) -> list[list[Frame]]:
    """Return the frames' bytes in pieces, those of one entry together."""
    if sum(map(len, frames)) <= PIECE:
        return [[frame for frame in frames if len(frame)]]
    parts: list[list[Frame]] = [[]]
    room = PIECE
    for frame in frames:
        content = memoryview(frame)
        while content:
            if not room:
                parts.append([])
                room = PIECE
            piece, content = content[:room], content[room:]
            parts[-1].append(piece)
            room -= len(piece)
    return parts


class Addition:
    """Packer of the commands that add messages to the stream `key`, in Redis' own protocol.

    The part that all messages share is packed once. `name`: such a command without its content.
    """

    def __init__(self, key: bytes) -> None:
        """Pack the part of the commands that all messages share."""
        self.name: Command = (b"XADD", key)
        self._create = b"$4\r\nXADD\r\n$%d\r\n%b\r\n" % (len(key), key)
        self._existing = self._create + b"$10\r\nNOMKSTREAM\r\n"

    def pack(
        self, number: int, frames: Sequence[Frame], milliseconds: int, *, create: bool = False
    ) -> list[list[Frame]]:
        """Return the commands that add message `number`, one for each entry, as chunks of bytes.

        Args:
            number: Number of the message in its queue.
            frames: Header and tensors of the message.
            milliseconds: Time since 1970.
            create: False if nothing is to be added to a stream that does not exist.
        """
        parts = _parts(frames[1:])
        headers = [b""] * (len(parts) - 1) + [frames[0]]
        pairs = enumerate(zip(parts, headers, strict=True), start=1)
        return [self._entry(b"%d-%d" % (number, place), milliseconds, *pair, create=create) for place, pair in pairs]

    def _entry(
        self, entry_id: bytes, milliseconds: int, pieces: Sequence[Frame], header: Frame, *, create: bool
    ) -> list[Frame]:
        begin, time = self._create if create else self._existing, b"%d" % milliseconds
        count = 6 - create + 2 * len(pieces) + 2 * bool(header)
        text = b"*%d\r\n%b$%d\r\n%b\r\n$1\r\nt\r\n$%d\r\n%b\r\n" % (
            *(count, begin),
            *(len(entry_id), entry_id),
            *(len(time), time),
        )
        chunks: list[Frame] = []
        small: list[Frame] = [text]
        for piece in pieces:
            small.append(b"$1\r\nd\r\n$%d\r\n" % len(piece))
            if len(piece) > UNCOPIED:
                chunks += (b"".join(small), piece)
                small = [b"\r\n"]
            else:
                small += (piece, b"\r\n")
        if header:
            small += (b"$1\r\nh\r\n$%d\r\n" % len(header), header, b"\r\n")
        return [*chunks, b"".join(small)]


class StepDigests:
    """Digests of the steps of `queue`, each added to `found` once all messages of its step came in order.

    A step has no digest if it is not seen from its beginning on, or if the content of one of its messages is not known.
    """

    def __init__(self, queue: Queue, found: deque[StepDigest], form: Callable[[], EntryForm] = lambda: PLAIN) -> None:
        """Begin before any message of `queue`.

        Args:
            queue: Queue as the program has it.
            found: Deque to which digests are added.
            form: Returns the form of the messages, which has the keys of digests.
        """
        self._form = form
        self._name = queue.name
        self._per_step = queue.count
        self._found = found
        self._next = -1
        self._messages: list[str | None] = []

    def add(self, number: int, fingerprint: Hashable) -> None:
        """Add message `number`, which was put or taken, to the digest of its step."""
        step, place = divmod(number, self._per_step)
        if place == 0:
            self._messages = []
        elif number != self._next:
            return
        self._next = number + 1
        self._messages.append(digest_of(fingerprint))
        known = [each for each in self._messages if each is not None]
        if place + 1 == len(known) == self._per_step:
            self._found.append((self._name, step, self._digest(step, "".join(known))))

    def _digest(self, step: int, known: str) -> str:
        form = self._form()
        return blake2b(known.encode(), digest_size=8, key=form.digest_key(step)).hexdigest() + form.digest_mark(step)
