"""Answers of a Redis server: one to a command by itself, and several to those of a transaction.

    unit                        answers                                outcome
    XADD                        id                                     [id]
    MULTI SET INCR EXEC         OK QUEUED QUEUED [OK, 7]               [OK, 7]
    MULTI SET INCR EXEC         OK error QUEUED EXECABORT              [error]

Answers may come in pieces, and some units' before the others'.

Announced sizes are checked before a parser makes room for them:

    *3 $5 forward $2 17 *-1        an array of three elements: a string of 5 bytes, ...

hiredis makes a list as long as an array is said to be, before its first element is here: 16 bytes can ask for 34 GB.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any

import hiredis
from redis.connection import DefaultParser
from redis.exceptions import (
    AskError,
    ClusterCrossSlotError,
    InvalidResponse,
    MovedError,
    NoPermissionError,
    OutOfMemoryError,
    RedisError,
    ResponseError,
)

from stageline.broker.errors import BrokerError

from .units import Chunk, Unit, UnwaitingSocket

READ = 2**18  # bytes received at once

_MISPLACED = (MovedError, AskError, ClusterCrossSlotError)


class KeyReplaced(ResponseError):
    """Error in place of the answer to a command on a key of another type; the text names the key."""


class AnswerReader:
    """Reader of one connection after the other to the server at `address`."""

    def __init__(self, address: str) -> None:
        """Make a reader without a connection, for the server at `address`."""
        self._address = address
        self._buffer = bytearray(READ)
        self._socket: Any = None
        self._unwaiting: Any = None
        self._parser: Any = None
        self._answers: list[Any] = []  # those that are here, while others of the same units are not

    @property
    def is_open(self) -> bool:
        """True if there is a connection to read from."""
        return self._socket is not None

    @property
    def descriptor(self) -> int | None:
        """Descriptor of the connection; None without one."""
        unwaiting = self._unwaiting
        return None if unwaiting is None else unwaiting.descriptor

    def open(self, connection: Any) -> None:
        """Read from here on from this `connection` of redis-py, which is made."""
        errors = connection._parser.parse_error  # redis-py's classes for what servers answer
        self._parser = SizedReader(hiredis.Reader(protocolError=InvalidResponse, replyError=errors))
        self._socket, self._unwaiting = connection._sock, UnwaitingSocket(connection._sock)

    def interrupt(self) -> None:
        """End the connection for the thread that uses it, and keep its descriptor. Safe to call from any thread."""
        if (unwaiting := self._unwaiting) is not None:
            unwaiting.interrupt()

    def close(self) -> None:
        """Forget the connection, and the answers that were read in part."""
        self._socket = self._unwaiting = self._parser = None
        self._answers.clear()

    def wait(self, units: Sequence[Unit]) -> list[list[Any]]:
        """Return the answers to each of the `units`, which were sent before.

        An answer may be a `ResponseError`; of a unit that was refused as a whole it is the only one.

        Raises:
            OSError: The connection breaks.
            RedisError: The connection breaks, or brings what is no answer.
            RedisUnfit: The server answers with an error that trying again cannot mend.
        """
        self._read(units, self._wait_for_more)
        return self._outcomes(units)

    def now(self, units: Sequence[Unit]) -> list[list[Any]] | None:
        """Return what `wait` returns if all answers are here; None, without waiting, if they are not."""
        return self._outcomes(units) if self._read(units, self._read_more) else None

    def write(self, packed: Sequence[Chunk]) -> Sequence[Chunk]:
        """Send what the system takes without waiting and return the rest. Raises `OSError` if the connection breaks."""
        if self._socket is None:
            raise ConnectionError("the connection was closed")
        rest: Sequence[Chunk] = self._unwaiting.write(packed)
        return rest

    def _read(self, units: Sequence[Unit], more: Callable[[], int | None]) -> bool:
        """Read until all answers to the units are here. Returns False if they are not, and `more` gives none."""
        if self._socket is None:
            raise ConnectionError("the connection was closed")
        missing = sum(map(_count, units)) - len(self._answers)
        while missing:
            answer = self._parser.gets()
            if answer is not False:
                self._answers.append(self._checked(answer))
                missing -= 1
            elif (count := more()) is None:
                return False
            else:
                self._feed(count)
        return True

    def _wait_for_more(self) -> int:
        count: int = self._socket.recv_into(self._buffer)
        return count

    def _read_more(self) -> int | None:
        count: int | None = self._unwaiting.read(self._buffer)
        return count

    def _feed(self, count: int) -> None:
        if not count:
            raise ConnectionError("the server closed the connection")
        self._parser.feed(self._buffer, 0, count)

    def _outcomes(self, units: Sequence[Unit]) -> list[list[Any]]:
        self._parser.begin()
        answers, self._answers = iter(self._answers), []
        return [self._outcome(unit, answers) for unit in units]

    def _outcome(self, unit: Unit, answers: Iterator[Any]) -> list[Any]:
        if len(unit) == 1:
            return [next(answers)]
        queued = list(islice(answers, len(unit) + 1))
        match next(answers):
            case list(carried_out) if len(carried_out) == len(unit):
                return [self._checked(answer) for answer in carried_out]
            case None:
                return [ResponseError("a watched key was changed by another client")]
            case ResponseError() as error:
                return [next((answer for answer in queued if isinstance(answer, ResponseError)), error)]
            case answer:
                raise InvalidResponse(f"{answer!r:.80} is no answer to a transaction")

    def _checked(self, answer: Any) -> Any:
        """Return the answer, or raise an error that is not of one command; `RedisUnfit` if a retry cannot mend it."""
        if not isinstance(answer, RedisError):
            return answer
        if isinstance(answer, NoPermissionError):
            raise RedisUnfit(f"the user of this run may not do all it needs at {self._address}: {answer}")
        if isinstance(answer, _MISPLACED):
            raise RedisUnfit(f"the keys of this run cannot be kept at {self._address}: {answer}")
        if not isinstance(answer, ResponseError):
            raise answer
        return answer


def sound(answers: list[Any]) -> list[Any]:
    """Return the answers to a unit. Raises `RedisRefusal` if one of them is an error."""
    for answer in answers:
        if isinstance(answer, KeyReplaced):
            raise RedisKeyTaken(str(answer))
        if isinstance(answer, ResponseError):
            full = "its memory is full: " if isinstance(answer, OutOfMemoryError) else ""
            raise RedisRefusal(f"Redis refuses: {full}{plain(answer)}")
    return answers


def is_of_wrong_type(answer: object) -> bool:
    """Return True if a command found a key of another type than it is for."""
    return isinstance(answer, ResponseError) and str(answer).startswith("WRONGTYPE")


def plain(error: Exception) -> str:
    """Return the text of `error` without its full stop, to be continued."""
    return str(error).rstrip(".")


def _count(unit: Unit) -> int:
    """Return the number of answers: in a transaction also to MULTI, to each command that it is queued, and to EXEC."""
    return 1 if len(unit) == 1 else len(unit) + 2


MOST_BYTES = 2**30  # of all answers to what was sent together; the largest of this program's own have about half
MOST_ELEMENTS = 2**25  # of all arrays in them: the losses of 16 million steps, which the broker's store reads at once
LONGEST_LINE = 2**14  # bytes of a line: a length, a number, or the text of an error

_ARRAY, _STRING, _LINES = b"*"[0], b"$"[0], b"+-:"
_SHORT = b"|".join(b"%d\r\n.{%d}" % (size, size) for size in range(40))
# What is small and whole is passed over in one step: one by one, its parts take 3 us more for each message.
_small = re.compile(rb"(?:\*\d{1,5}\r\n|\$(?:" + _SHORT + rb")\r\n|[+:][^\r\n]{0,60}\r\n)*", re.DOTALL).match


class SizeRefused(InvalidResponse):
    """Error that an answer is, or announces, what cannot be the answer to a command of this program."""


class AnnouncedSizes:
    """Check of the sizes that the bytes of a connection announce, in the protocol RESP 2.

    Only lengths are looked at; the content of strings is passed over.
    """

    def __init__(self) -> None:
        """Begin at the start of an answer."""
        self._ahead = 0  # bytes that still come of a string
        self._line = b""  # the beginning of a line whose end has not come
        self.begin()

    def begin(self) -> None:
        """Reset the counts: all answers to the requests that were sent together are here."""
        self._bytes = self._elements = 0

    def check(self, chunk: bytes | bytearray, count: int) -> None:
        """Check the first `count` bytes of `chunk`, which have come. Raises `SizeRefused`."""
        self._add(count)
        if self._line:
            chunk = self._line + chunk[:count]
            count, self._line = len(chunk), b""
        place = self._ahead
        while place < count:
            place = _small(chunk, place, count).end()  # type: ignore[union-attr]  # it matches nothing, too
            end = chunk.find(b"\r\n", place, count)
            if end < 0:
                self._line = self._begun(bytes(chunk[place:count]))
                place = count
            else:
                place = end + 2 + self._announced(chunk[place], chunk[place + 1 : end])
        self._ahead = place - count

    def _announced(self, kind: int, text: bytes | bytearray) -> int:
        """Return the number of bytes between a line and the next one."""
        if kind == _STRING:
            size = _length(text)
            if size > MOST_BYTES:
                raise SizeRefused(f"it announces a string of {size} bytes; {MOST_BYTES} may come in an answer")
            return size + 2 if size >= 0 else 0
        if kind == _ARRAY:
            self._add_elements(_length(text))
        elif kind not in _LINES:
            raise SizeRefused(f"{bytes([kind]) + text[:32]!r} begins no answer in RESP 2")
        return 0

    def _add(self, count: int) -> None:
        self._bytes += count
        if self._bytes > MOST_BYTES:
            raise SizeRefused(f"more than {MOST_BYTES} bytes come in an answer")

    def _add_elements(self, length: int) -> None:
        self._elements += max(0, length)
        if self._elements > MOST_ELEMENTS:
            raise SizeRefused(f"it announces an array of {length} elements; {MOST_ELEMENTS} may come in an answer")

    def _begun(self, line: bytes) -> bytes:
        if len(line) > LONGEST_LINE:
            raise SizeRefused(f"a line of more than {LONGEST_LINE} bytes comes, {line[:32]!r}...")
        return line


class SizedReader:
    """Wrapper of `reader`, of hiredis, that feeds it only what is not too large."""

    def __init__(self, reader: Any) -> None:
        """Wrap `reader`, which has been fed nothing."""
        self.gets: Callable[..., Any] = reader.gets
        self.has_data: Callable[[], bool] = reader.has_data
        self._feed: Callable[..., object] = reader.feed
        self._sizes = AnnouncedSizes()
        self.begin = self._sizes.begin

    def feed(self, buffer: bytearray, start: int, count: int) -> None:
        """Feed the first `count` bytes of the buffer to the reader; `start` is 0. Raises `SizeRefused`."""
        self._sizes.check(buffer, count)
        self._feed(buffer, start, count)


class SizedParser(DefaultParser):  # type: ignore[misc, valid-type]  # redis-py chooses its class when it is imported
    """Parser with checked sizes, based on redis-py's own, for the answers while a connection is made."""

    _reader: Any

    def on_connect(self, connection: Any, **options: Any) -> None:
        """Read from `connection` on, with checked sizes."""
        super().on_connect(connection, **options)
        self._reader = SizedReader(self._reader)


def _length(text: bytes | bytearray) -> int:
    try:
        return int(text)
    except ValueError:
        raise SizeRefused(f"it announces the length {bytes(text[:32])!r}") from None


class RedisAway(BrokerError):
    """Error that a Redis server cannot be reached, or the connection to it broke.

    Mend: Look at the server and the network: the run waits, and goes on when the server is back.

    Example: Redis at redis://desk:6379/0 cannot be reached: Connection refused
    """

    error_code = "SL313"


class RedisGarbled(RedisAway):
    """Error that the bytes from a Redis server are no answer, or announce more than one can have.

    They were damaged on their way, or it is another kind of server. The connection is closed.

    Mend: See which program listens at that address, and whether something on the way changes bytes.

    Example: Redis at redis://desk:6379/0 answers as no Redis server does: Protocol error. Bytes are damaged on their
    way, or something else listens at that address
    """

    error_code = "SL314"


class RedisRefusal(BrokerError):
    """Error that a Redis server is full, or cannot write to its disk.

    Mend: Give it more memory (`maxmemory`) or disk: the run waits for a while, and goes on then.

    Example: Redis refuses: its memory is full: command not allowed when used memory > 'maxmemory'
    """

    error_code = "SL315"


class RedisKeyTaken(RedisRefusal):
    """Error that another client of the Redis server has replaced a key of this run.

    Mend: Keep other programs out of this run's keys, or give the run a database of its own: `redis://host:6379/1`.

    Example: the keys of this run cannot be kept at redis://desk:6379/0: WRONGTYPE of stageline:a:forward-1.
    """

    error_code = "SL316"


class RedisUnfit(BrokerError):
    """Error that a Redis server cannot be used as it is: settings, version or access rules.

    Mend: Change the setting that the message names, or the user, password or certificate in the address;
    docs/reference/redis.md has them all.

    Example: Redis at redis://desk:6379/0 refuses the connection: max number of clients reached
    """

    error_code = "SL317"
