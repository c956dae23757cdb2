"""A connection to a Redis server (or Valkey): commands are sent together, their answers come back in order.

redis-py makes the connection, with users, passwords and TLS from the URL. Its retries are off: a command whose answer
was cut off may have been carried out, which only the caller can find out.

A server can carry a run if it has version 6.2 or newer, and never evicts keys.
"""

import re
import ssl
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

import hiredis
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


@dataclass(frozen=True, slots=True)
class Exchange:
    """Commands that are carried out together, and the function that takes their answers."""

    unit: Unit
    receive: Callable[[list[Any]], None]


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

    def ask(self, *command: bytes | memoryview) -> Any:
        """The answer to one command. Raises `RedisRefusal` if it is an error."""
        (outcome,) = self.exchange([[command]])
        return sound(outcome)[0]

    def check(self, answers: list[Any]) -> None:
        """Checks what the server answered to `INQUIRY`. Raises `RedisUnfit`, or `RedisRefusal` if it did not."""
        self.warnings = check_fitness(self.address, sound(answers))

    def close(self) -> None:
        self.is_fit = False
        self._connection.disconnect()

    def _send(self, packed: Sequence[bytes | memoryview]) -> None:
        with self._explained():
            self._connection.connect()
            self._connection.send_packed_command(packed, check_health=False)

    def _receive(self, units: Sequence[Unit]) -> list[list[Any]]:
        with self._explained():
            outcomes = [self._outcome(unit) for unit in units]
            return [self._named(unit, outcome) for unit, outcome in zip(units, outcomes, strict=True)]

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """After any error the connection is closed: answers may still be on their way."""
        try:
            yield
        except (RedisError, OSError) as error:
            self.close()
            raise self._trouble(error) from error
        except BaseException:  # anything else that interrupts an answer is raised as it is
            self.close()
            raise

    def _outcome(self, unit: Unit) -> list[Any]:
        if len(unit) == 1:
            return [self._answer()]
        queued = [self._answer() for _ in range(len(unit) + 1)]
        match self._answer():
            case list(answers) if len(answers) == len(unit):
                return [self._checked(answer) for answer in answers]
            case None:
                return [ResponseError("a watched key was changed by another client")]
            case ResponseError() as error:
                return [next((answer for answer in queued if isinstance(answer, ResponseError)), error)]
            case answer:
                raise InvalidResponse(f"{answer!r} is no answer to a transaction")

    def _answer(self) -> Any:
        try:
            return self._connection.read_response(disconnect_on_error=False)
        except ResponseError as error:
            return self._checked(error)

    def _checked(self, answer: Any) -> Any:
        """The answer. Raises `RedisUnfit` if trying again cannot mend it."""
        if isinstance(answer, NoPermissionError):
            raise RedisUnfit(f"the user of this run may not do all it needs at {self.address}: {answer}")
        if isinstance(answer, _MISPLACED):
            raise RedisUnfit(f"the keys of this run cannot be kept at {self.address}: {answer}")
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
        self._connection.send_packed_command(pack([[(b"TYPE", key)]]), check_health=False)
        answer = self._answer()
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
        connection: AbstractConnection = make(**options, retry=Retry(NoBackoff(), 0), protocol=2, socket_read_size=READ)
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
