"""Reads what a Redis server answers: one answer to a command by itself, and several to those of a transaction.

    unit                        answers                                outcome
    XADD                        id                                     [id]
    MULTI SET INCR EXEC         OK QUEUED QUEUED [OK, 7]               [OK, 7]
    MULTI SET INCR EXEC         OK error QUEUED EXECABORT              [error]

Answers may come in pieces, and some units' before the others'.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any

import hiredis

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

from .errors import RedisKeyTaken, RedisRefusal, RedisUnfit
from .sizes import SizedReader
from .socket import UnwaitingSocket
from .units import Unit

READ = 2**18  # bytes received at once

_MISPLACED = (MovedError, AskError, ClusterCrossSlotError)


class KeyReplaced(ResponseError):
    """What stands for the answer to a command on a key of another type; the text names it."""


class AnswerReader:
    """Reads from one connection after the other to the server at `address`."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._buffer = bytearray(READ)
        self._socket: Any = None
        self._unwaiting: Any = None
        self._parser: Any = None
        self._answers: list[Any] = []  # those that are here, while others of the same units are not

    @property
    def is_open(self) -> bool:
        return self._socket is not None

    @property
    def descriptor(self) -> int | None:
        """That of the connection, if there is one."""
        unwaiting = self._unwaiting
        return None if unwaiting is None else unwaiting.descriptor

    def open(self, connection: Any) -> None:
        """Reads from here on from this `connection` of redis-py, which is made."""
        errors = connection._parser.parse_error  # redis-py's classes for what servers answer
        self._parser = SizedReader(hiredis.Reader(protocolError=InvalidResponse, replyError=errors))
        self._socket, self._unwaiting = connection._sock, UnwaitingSocket(connection._sock)

    def interrupt(self) -> None:
        """Ends the connection for the thread that reads or writes, and keeps its descriptor. For any thread."""
        if (unwaiting := self._unwaiting) is not None:
            unwaiting.interrupt()

    def close(self) -> None:
        self._socket = self._unwaiting = self._parser = None
        self._answers.clear()

    def wait(self, units: Sequence[Unit]) -> list[list[Any]]:
        """The answers to each of the `units`, which were sent before. An answer may be a `ResponseError`; of a unit
        that was refused as a whole it is the only one. Raises `OSError` or `RedisError` if the connection breaks,
        `RedisUnfit` for an error that trying again cannot mend."""
        self._read(units, self._wait_for_more)
        return self._outcomes(units)

    def now(self, units: Sequence[Unit]) -> list[list[Any]] | None:
        """As `wait`, if all answers are here. If not, does not wait: None."""
        return self._outcomes(units) if self._read(units, self._read_more) else None

    def write(self, packed: Sequence[bytes | memoryview]) -> Sequence[bytes | memoryview]:
        """Sends what the system takes without waiting. What is left. Raises `OSError` if the connection breaks."""
        if self._socket is None:
            raise ConnectionError("the connection was closed")
        rest: Sequence[bytes | memoryview] = self._unwaiting.write(packed)
        return rest

    def _read(self, units: Sequence[Unit], more: Callable[[], int | None]) -> bool:
        """Reads until all answers to the units are here. False if they are not, and `more` gives none."""
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
        """The answer. Raises an error that is not of one command; `RedisUnfit` if trying again cannot mend it."""
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
    """The answers to a unit. Raises `RedisRefusal` if one of them is an error."""
    for answer in answers:
        if isinstance(answer, KeyReplaced):
            raise RedisKeyTaken(str(answer))
        if isinstance(answer, ResponseError):
            full = "its memory is full: " if isinstance(answer, OutOfMemoryError) else ""
            raise RedisRefusal(f"Redis refuses: {full}{plain(answer)}")
    return answers


def is_of_wrong_type(answer: object) -> bool:
    """Whether a command found a key of another type than it is for."""
    return isinstance(answer, ResponseError) and str(answer).startswith("WRONGTYPE")


def plain(error: Exception) -> str:
    """The text of `error`, to be continued."""
    return str(error).rstrip(".")


def _count(unit: Unit) -> int:
    """How many answers come: in a transaction also to MULTI, to each command that it is queued, and to EXEC."""
    return 1 if len(unit) == 1 else len(unit) + 2
