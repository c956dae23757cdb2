"""Connection to a Redis server (or Valkey): commands are sent together, their answers come back in order.

redis-py makes the connection, with users, passwords and TLS from the URL. Its retries are off: a command whose answer
was cut off may have been carried out, which only the caller can find out.

A server is fit for a run if it has version 6.2 or newer, or is Valkey, and never evicts keys.
"""

import re
import ssl
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from redis.backoff import NoBackoff
from redis.connection import AbstractConnection, Connection, UnixDomainSocketConnection, parse_url
from redis.exceptions import AuthenticationError, InvalidResponse, RedisError, ResponseError
from redis.retry import Retry

from stageline.broker.errors import BrokerError
from stageline.pipeline.addresses import masked, unclear_password

from .answers import (
    AnswerReader,
    KeyReplaced,
    RedisAway,
    RedisGarbled,
    RedisUnfit,
    SizedParser,
    is_of_wrong_type,
    plain,
    sound,
)
from .units import Chunk, Command, Unit, pack

CONNECTING = 5.0  # seconds
SILENCE = 10.0  # seconds without a byte, in or out, after which a connection counts as lost

_TYPES = {b"X": "stream", b"H": "hash", b"L": "list", b"R": "list", b"B": "list"}  # by a command's first letter


Given = TypeVar("Given")
Made = TypeVar("Made")


class RedisLink:
    """Connection to the server at `url`: `redis://`, `rediss://` (TLS) or `unix://`. Connects when first used.

    A link is for one thread at a time.
    """

    def __init__(self, url: str) -> None:
        """Prepare the connection. Raises `RedisUnfit` for a URL that cannot be understood."""
        self.address = masked(url)
        self.warnings: tuple[str, ...] = ()
        self.is_fit = False  # the connection is made, and its server was checked
        self._connection: Any = _connection(url, self.address)  # its methods have no types
        self._answers = AnswerReader(self.address)

    def exchange(self, units: Sequence[Unit]) -> list[list[Any]]:
        """Carry out the units, each as a whole, and return the answers of each.

        An answer may be a `ResponseError`; of a unit that was refused as a whole it is the only one.

        Raises:
            RedisAway: The connection breaks. It is unknown then what was carried out.
            RedisUnfit: The server cannot be used as it is: trying again cannot mend that.
        """
        self.send(pack(units))
        return self.receive(units)

    def send(self, packed: Sequence[Chunk]) -> None:
        """Send what `pack` made of some units; `receive` waits for the answers. Raises as `exchange` does."""
        if not self.is_fit:
            self._explained(self._write, pack([INQUIRY]))
            (answers,) = self._explained(self._take, [INQUIRY])
            self.check(answers)
            self.is_fit = True
        self._explained(self._write, packed)

    def receive(self, units: Sequence[Unit]) -> list[list[Any]]:
        """Return the answers to the units that were sent before. Raises as `exchange` does."""
        self._check_unbroken()
        return self._explained(self._take, units)

    def receive_now(self, units: Sequence[Unit]) -> list[list[Any]] | None:
        """Return what `receive` returns if all answers are here; None, without waiting, if they are not."""
        return self._explained(self._take_now, units)

    def send_now(self, packed: Sequence[Chunk]) -> Sequence[Chunk]:
        """Send what the system takes without waiting, and return what is left, for `send_rest`.

        Call it only while `is_fit`. Raises as `exchange` does.
        """
        return self._explained(self._answers.write, packed)

    def send_rest(self, packed: Sequence[Chunk]) -> None:
        """Send what `send_now` has left. Raises as `exchange` does."""
        self._check_unbroken()
        if packed:
            self._explained(self._write, packed)

    @property
    def fd(self) -> int | None:
        """Descriptor that is readable when more of an answer is here. None if the connection is closed."""
        return self._answers.descriptor

    def ask(self, *command: bytes | memoryview) -> Any:
        """Return the answer to one command. Raises `RedisRefusal` if it is an error."""
        (outcome,) = self.exchange([[command]])
        return sound(outcome)[0]

    def check(self, answers: list[Any]) -> None:
        """Check the server's answers to `INQUIRY`. Raises `RedisUnfit`, or `RedisRefusal` if one is an error."""
        self.warnings = check_fitness(self.address, sound(answers))

    def interrupt(self) -> None:
        """End what another thread waits for here; that thread gets an error. Safe to call from any thread.

        Unlike `close`, it leaves the descriptor open, which that thread may be about to use, and which would otherwise
        soon be another file's.
        """
        self._answers.interrupt()

    def close(self) -> None:
        """Close the connection; the next use makes a new one."""
        self.is_fit = False
        self._answers.close()
        self._connection.disconnect()

    def _write(self, packed: Sequence[Chunk]) -> None:
        if not self._answers.is_open:
            self._connection.connect()
            self._answers.open(self._connection)
        if rest := self._answers.write(packed):
            self._connection.send_packed_command(rest, check_health=False)

    def _take(self, units: Sequence[Unit]) -> list[list[Any]]:
        return self._all_named(units, self._answers.wait(units))

    def _take_now(self, units: Sequence[Unit]) -> list[list[Any]] | None:
        outcomes = self._answers.now(units)
        return None if outcomes is None else self._all_named(units, outcomes)

    def _check_unbroken(self) -> None:
        if not self.is_fit:
            raise RedisAway(f"the connection to Redis at {self.address} broke")

    def _explained(self, use: Callable[[Sequence[Given]], Made], given: Sequence[Given]) -> Made:
        """Use the connection. After any error it is closed: answers may still be on their way."""
        try:
            return use(given)
        except (RedisError, OSError) as error:
            self.close()
            raise self._trouble(error) from error
        except MemoryError as error:
            self.close()
            raise MemoryError(f"there is no memory for what Redis at {self.address} answers") from error
        except BaseException:
            self.close()
            raise

    def _all_named(self, units: Sequence[Unit], outcomes: list[list[Any]]) -> list[list[Any]]:
        return [self._named(unit, outcome) for unit, outcome in zip(units, outcomes, strict=True)]

    def _named(self, unit: Unit, outcome: list[Any]) -> list[Any]:
        """Return the outcome, with the keys named that are of another type."""
        if not any(map(is_of_wrong_type, outcome)):
            return outcome
        pairs = zip(unit, outcome, strict=True)  # the server takes a command on such a key into a transaction
        return [self._replaced(command) if is_of_wrong_type(answer) else answer for command, answer in pairs]

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
        if isinstance(error, InvalidResponse):
            return RedisGarbled(
                f"Redis at {self.address} answers as no Redis server does: {plain(error)}. Bytes are damaged on their "
                "way, or something else listens at that address"
            )
        if isinstance(error, AuthenticationError):
            return RedisUnfit(
                f"Redis at {self.address} does not let this run in: {plain(error)}. Give user and password in the "
                "address, as in redis://user:password@host:6379/0"
            )
        if isinstance(error.__context__, ssl.SSLCertVerificationError):
            return RedisUnfit(
                f"the certificate of Redis at {self.address} is not trusted: {plain(error)}. Name the authority that "
                "signed it, as in rediss://host:6379/0?ssl_ca_certs=/path/to/ca.pem"
            )
        garbled = str(error).startswith("Protocol error")  # the command was damaged on its way
        if isinstance(error, ResponseError) and not garbled:  # in the handshake: an unknown database, for example
            return RedisUnfit(f"Redis at {self.address} refuses the connection: {plain(error)}")
        return RedisAway(f"Redis at {self.address} cannot be reached: {plain(error)}")


def _keys(command: Command) -> Command:
    """Return the keys that a command is about."""
    if command[0] != b"XREAD":
        return command[1:2]
    streams = command[command.index(b"STREAMS") + 1 :]
    return streams[: len(streams) // 2]


def _connection(url: str, address: str) -> AbstractConnection:
    if unclear := unclear_password(url):
        raise RedisUnfit(f"{address} is not an address of a Redis server: {unclear}")
    try:
        options: dict[str, Any] = dict(parse_url(url))  # type: ignore[no-untyped-call]
        make = options.pop("connection_class", Connection)
        options = {"socket_timeout": SILENCE, "socket_connect_timeout": CONNECTING, **options}
        if not issubclass(make, UnixDomainSocketConnection):
            options = {"socket_keepalive": True, **options}
        options["parser_class"] = SizedParser
        connection: AbstractConnection = make(**options, retry=Retry(NoBackoff(), 0), protocol=2)
    except (TypeError, ValueError) as error:
        raise RedisUnfit(
            f"{address} is not an address of a Redis server: {error}. Write redis://host:6379/0, rediss:// for TLS, "
            "or unix:///path/to/socket"
        ) from error
    return connection


OLDEST = (6, 2)  # knows XADD NOMKSTREAM and XTRIM MINID
INQUIRY = ((b"INFO", b"server"), (b"INFO", b"memory"), (b"INFO", b"persistence"))


def check_fitness(address: str, answers: Sequence[object]) -> tuple[str, ...]:
    """Return warnings about the server at `address`, from its answers to `INQUIRY`. Raises `RedisUnfit`."""
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
            raise RedisUnfit(f"Redis at {address} does not answer INFO: {answer!r:.80}")
        facts |= dict(re.findall(r"^(\w+):(.*?)\r?$", answer.decode("utf-8", "replace"), re.MULTILINE))
    return facts
