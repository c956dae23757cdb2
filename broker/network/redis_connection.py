"""A connection to a Redis server (or Valkey): commands are sent together, their answers come back in order.

redis-py makes the connection, with users, passwords and TLS from the URL. Its retries are off: a command whose answer
was cut off may have been carried out, which only the caller can find out.

A server can carry a run if it has version 6.2 or newer, and never evicts keys.
"""

import re
import ssl
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from types import TracebackType
from typing import Any, TypeAlias

import hiredis
import msgspec
from redis.backoff import NoBackoff
from redis.connection import (
    AbstractConnection,
    Connection,
    PythonRespSerializer,
    UnixDomainSocketConnection,
    parse_url,
)
from redis.exceptions import (
    AskError,
    AuthenticationError,
    ClusterCrossSlotError,
    InvalidResponse,
    MovedError,
    NoPermissionError,
    OutOfMemoryError,
    RedisError,
    ResponseError,
)
from redis.retry import Retry

from stageline.broker.errors import BrokerError
from stageline.pipeline.plan.addresses import masked, unclear_password

Command: TypeAlias = tuple[bytes | memoryview, ...]
Unit: TypeAlias = Sequence[Command]  # commands that are carried out together, or none of them

CONNECTING = 5.0  # seconds
SILENCE = 10.0  # seconds without a byte, in or out, after which a connection counts as lost
READ = 2**18  # bytes received at once
UNCOPIED = 2**16  # bytes of an argument from which on it is sent without a copy

OLDEST = (6, 2)  # knows XADD NOMKSTREAM and XTRIM MINID
INQUIRY = ((b"INFO", b"server"), (b"INFO", b"memory"), (b"INFO", b"persistence"))

_BEGIN, _END = (b"MULTI",), (b"EXEC",)
_pack_large: Callable[..., list[Any]] = PythonRespSerializer(UNCOPIED, lambda argument: argument).pack
_MISPLACED = (MovedError, AskError, ClusterCrossSlotError)
_TYPES = {b"X": "stream", b"H": "hash", b"L": "list", b"R": "list", b"B": "list"}  # by a command's first letter


class Exchange(msgspec.Struct, frozen=True):
    """Commands that are carried out together, and the function that takes their answers.

    `has_more`: what is asked next depends on them, so they must not be left unread.
    """

    unit: Unit
    receive: Callable[[list[Any]], None]
    has_more: bool = False


class RedisAway(BrokerError):
    """A Redis server cannot be reached now, or the connection to it broke; it may come back."""


class RedisRefusal(BrokerError):
    """A Redis server did not carry out a command, and may do so later: it is full, or cannot write to its disk."""


class RedisKeyTaken(RedisRefusal):
    """A key of this run is of another type: another client replaced it. It may be deleted again."""


class KeyReplaced(ResponseError):
    """What stands for the answer to a command on such a key; the text names it."""


class RedisUnfit(BrokerError):
    """A Redis server cannot be used as it is: its settings, its version or its access rules must change."""


class RedisLink:
    """A connection to the server at `url`: `redis://`, `rediss://` (TLS) or `unix://`. Connects when first used.

    For one thread at a time. Raises `RedisUnfit` for a URL that cannot be understood.
    """

    def __init__(self, url: str) -> None:
        self.address = masked(url)
        self.warnings: tuple[str, ...] = ()
        self.is_fit = False  # the connection is made, and its server was checked
        self._connection: Any = _connection(url, self.address)  # its methods have no types
        self._open: tuple[Any, hiredis.Reader] | None = None  # the socket, and what takes its answers apart
        self._buffer = bytearray(READ)
        self._answers: list[Any] = []  # those that are here, while others of the same units are not
        self._explained = _Explained(self.close, self._trouble)

    def exchange(self, units: Sequence[Unit]) -> list[list[Any]]:
        """Carries out the units, each as a whole. The answers of each.

        An answer may be a `ResponseError`; of a unit that was refused as a whole it is the only one. Raises
        `RedisAway` if the connection breaks (it is unknown then what was carried out), `RedisUnfit` for what trying
        again cannot mend.
        """
        self.send(pack(units))
        return self.receive(units)

    def send(self, packed: Sequence[bytes | memoryview]) -> None:
        """Sends what `pack` made of some units; `receive` waits for the answers. Raises as `exchange` does."""
        if not self.is_fit:
            self._send(pack([INQUIRY]))
            (answers,) = self._receive([INQUIRY])
            self.check(answers)
            self.is_fit = True
        self._send(packed)

    def receive(self, units: Sequence[Unit]) -> list[list[Any]]:
        """The answers to the units that were sent before. Raises as `exchange` does."""
        if not self.is_fit:
            raise RedisAway(f"the connection to Redis at {self.address} broke")
        return self._receive(units)

    def receive_now(self, units: Sequence[Unit]) -> list[list[Any]] | None:
        """As `receive`, if all answers are here. If not, does not wait: None."""
        with self._explained:
            return self._outcomes(units) if self._read(units, 0.0) else None

    @property
    def fd(self) -> int:
        """The descriptor that is readable when more of an answer is here. Only while `is_fit`."""
        number: int = self._connection._sock.fileno()
        return number

    def ask(self, *command: bytes | memoryview) -> Any:
        """The answer to one command. Raises `RedisRefusal` if it is an error."""
        (outcome,) = self.exchange([[command]])
        return sound(outcome)[0]

    def check(self, answers: list[Any]) -> None:
        """Checks what the server answered to `INQUIRY`. Raises `RedisUnfit`, or `RedisRefusal` if it did not."""
        self.warnings = check_fitness(self.address, sound(answers))

    def close(self) -> None:
        self.is_fit = False
        self._open = None
        self._answers.clear()
        self._connection.disconnect()

    def _send(self, packed: Sequence[bytes | memoryview]) -> None:
        with self._explained:
            if self._open is None:
                self._connection.connect()
                errors = self._connection._parser.parse_error  # redis-py's classes for what servers answer
                self._open = self._connection._sock, hiredis.Reader(protocolError=InvalidResponse, replyError=errors)
            self._connection.send_packed_command(packed, check_health=False)

    def _receive(self, units: Sequence[Unit]) -> list[list[Any]]:
        with self._explained:
            self._read(units, self._connection.socket_timeout)
            return self._outcomes(units)

    def _read(self, units: Sequence[Unit], timeout: float) -> bool:
        """Reads until all answers to the units are here. False if they are not, with a `timeout` of 0 seconds."""
        if self._open is None:
            raise ConnectionError("the connection was closed")
        connected, reader = self._open
        missing = sum(map(_count, units)) - len(self._answers)
        while missing:
            answer = reader.gets()
            if answer is not False:
                self._answers.append(self._checked(answer))
                missing -= 1
            elif not self._feed(connected, reader, timeout):
                return False
        return True

    def _feed(self, connected: Any, reader: Any, timeout: float) -> bool:
        connected.settimeout(timeout)
        try:
            count = connected.recv_into(self._buffer)
        except (BlockingIOError, ssl.SSLWantReadError):
            return False
        finally:
            connected.settimeout(self._connection.socket_timeout)
        if not count:
            raise ConnectionError("the server closed the connection")
        reader.feed(self._buffer, 0, count)
        return True

    def _outcomes(self, units: Sequence[Unit]) -> list[list[Any]]:
        answers, self._answers = iter(self._answers), []
        return [self._named(unit, self._outcome(unit, answers)) for unit in units]

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
                raise InvalidResponse(f"{answer!r} is no answer to a transaction")

    def _checked(self, answer: Any) -> Any:
        """The answer. Raises an error that is not of one command; `RedisUnfit` if trying again cannot mend it."""
        if not isinstance(answer, RedisError):
            return answer
        if isinstance(answer, NoPermissionError):
            raise RedisUnfit(f"the user of this run may not do all it needs at {self.address}: {answer}")
        if isinstance(answer, _MISPLACED):
            raise RedisUnfit(f"the keys of this run cannot be kept at {self.address}: {answer}")
        if not isinstance(answer, ResponseError):
            raise answer
        return answer

    def _named(self, unit: Unit, outcome: list[Any]) -> list[Any]:
        """The outcome, with the keys named that are of another type."""
        if not any(map(_is_of_wrong_type, outcome)):
            return outcome
        pairs = zip(unit, outcome, strict=True)  # the server takes a command on such a key into a transaction
        return [self._replaced(command) if _is_of_wrong_type(answer) else answer for command, answer in pairs]

    def _replaced(self, command: Command) -> KeyReplaced:
        wanted = _TYPES.get(bytes(command[0][:1]), "string")
        types = [(bytes(key).decode("utf-8", "replace"), self._type_of(key)) for key in _keys(command)]
        key, kind = next((pair for pair in types if pair[1] not in (wanted, "none")), types[0])
        found = f"is a {kind}, not a {wanted}" if kind != "none" else f"was not a {wanted}"
        return KeyReplaced(f"key {key} {found}: another client replaced it. Delete it, and the run goes on")

    def _type_of(self, key: bytes | memoryview) -> str:
        ((answer,),) = self.exchange([[(b"TYPE", key)]])
        return answer.decode() if isinstance(answer, bytes) else "key of another type"

    def _trouble(self, error: RedisError | OSError) -> BrokerError:
        if isinstance(error, AuthenticationError):
            return RedisUnfit(
                f"Redis at {self.address} does not let this run in: {_plain(error)}. Give user and password in the "
                "address, as in redis://user:password@host:6379/0"
            )
        if isinstance(error.__context__, ssl.SSLCertVerificationError):
            return RedisUnfit(
                f"the certificate of Redis at {self.address} is not trusted: {_plain(error)}. Name the authority that "
                "signed it, as in rediss://host:6379/0?ssl_ca_certs=/path/to/ca.pem"
            )
        garbled = str(error).startswith("Protocol error")  # the command was damaged on its way
        if isinstance(error, ResponseError) and not garbled:  # in the handshake: an unknown database, for example
            return RedisUnfit(f"Redis at {self.address} refuses the connection: {_plain(error)}")
        return RedisAway(f"Redis at {self.address} cannot be reached: {_plain(error)}")


def _count(unit: Unit) -> int:
    """How many answers come: in a transaction also to MULTI, to each command that it is queued, and to EXEC."""
    return 1 if len(unit) == 1 else len(unit) + 2


class _Explained:
    """After any error in it the connection is closed: answers may still be on their way."""

    def __init__(self, close: Callable[[], None], explain: Callable[[RedisError | OSError], BrokerError]) -> None:
        self._close = close
        self._explain = explain

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self._close()
        if isinstance(error, (RedisError, OSError)):
            raise self._explain(error) from error  # anything else is raised as it is


def sound(answers: list[Any]) -> list[Any]:
    """The answers to a unit. Raises `RedisRefusal` if one of them is an error."""
    for answer in answers:
        if isinstance(answer, KeyReplaced):
            raise RedisKeyTaken(str(answer))
        if isinstance(answer, ResponseError):
            full = "its memory is full: " if isinstance(answer, OutOfMemoryError) else ""
            raise RedisRefusal(f"Redis refuses: {full}{_plain(answer)}")
    return answers


def _is_of_wrong_type(answer: object) -> bool:
    return isinstance(answer, ResponseError) and str(answer).startswith("WRONGTYPE")


def _keys(command: Command) -> Command:
    """The keys that a command is about."""
    if command[0] != b"XREAD":
        return command[1:2]
    streams = command[command.index(b"STREAMS") + 1 :]
    return streams[: len(streams) // 2]


def _plain(error: Exception) -> str:
    """The text of `error`, to be continued."""
    return str(error).rstrip(".")


def _connection(url: str, address: str) -> AbstractConnection:
    if unclear := unclear_password(url):
        raise RedisUnfit(f"{address} is not an address of a Redis server: {unclear}")
    try:
        options: dict[str, Any] = dict(parse_url(url))  # type: ignore[no-untyped-call]
        make = options.pop("connection_class", Connection)
        options = {"socket_timeout": SILENCE, "socket_connect_timeout": CONNECTING, **options}
        if not issubclass(make, UnixDomainSocketConnection):
            options = {"socket_keepalive": True, **options}
        connection: AbstractConnection = make(**options, retry=Retry(NoBackoff(), 0), protocol=2)
    except (TypeError, ValueError) as error:
        raise RedisUnfit(
            f"{address} is not an address of a Redis server: {error}. Write redis://host:6379/0, rediss:// for TLS, "
            "or unix:///path/to/socket"
        ) from error
    return connection


def pack(units: Sequence[Unit]) -> list[bytes | memoryview]:
    """The units in Redis' own protocol. Large arguments are not copied; everything between them is in one piece."""
    chunks: list[bytes | memoryview] = []
    small: list[bytes] = []
    for unit in units:
        for command in unit if len(unit) == 1 else (_BEGIN, *unit, _END):
            if max(map(len, command)) > UNCOPIED:
                head, *middle, tail = _pack_large(*command)
                chunks += [b"".join([*small, head]), *middle]
                small = [tail]
            else:
                small.append(hiredis.pack_command(command))  # type: ignore[arg-type]  # typed for one argument
    return [*chunks, b"".join(small)]


def check_fitness(address: str, answers: Sequence[object]) -> tuple[str, ...]:
    """Warnings about the server at `address`, from its answers to `INQUIRY`. Raises `RedisUnfit`."""
    facts = _facts(address, answers)
    version = facts.get("redis_version", "unknown")
    if tuple(int(number) for number in re.findall(r"\d+", version)[:2]) < OLDEST:
        raise RedisUnfit(f"Redis at {address} is version {version}; queues need 6.2 or newer, or Valkey")
    policy = facts.get("maxmemory_policy", "unknown")
    if policy != "noeviction":
        raise RedisUnfit(
            f"Redis at {address} has maxmemory-policy {policy}: it would throw messages away when its memory is full. "
            "Set it to noeviction, in redis.conf or by CONFIG SET maxmemory-policy noeviction"
        )
    if facts.get("aof_enabled") != "1":
        return (
            f"Redis at {address} has no append-only file: what it holds is gone when it restarts, and is added again "
            "by the workers that still have it. Set appendonly to yes, in redis.conf or by CONFIG SET appendonly yes",
        )
    return ()


def _facts(address: str, answers: Sequence[object]) -> dict[str, str]:
    facts: dict[str, str] = {}
    for answer in answers:
        if not isinstance(answer, bytes):
            raise RedisUnfit(f"Redis at {address} does not answer INFO: {answer!r}")
        facts |= dict(re.findall(r"^(\w+):(.*?)\r?$", answer.decode("utf-8", "replace"), re.MULTILINE))
    return facts
