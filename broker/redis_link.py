"""A connection to a Redis server (or Valkey): what is asked goes out together, the answers come back in order.

redis-py makes the connection, with users, passwords and TLS from the URL. Its retries are off: a command whose answer
was cut off may have been carried out, and only who sent it can find out.
"""

import ssl
from collections.abc import Sequence
from typing import Any, TypeAlias
from urllib.parse import urlsplit

from redis.backoff import NoBackoff
from redis.connection import AbstractConnection, Connection, UnixDomainSocketConnection, parse_url
from redis.exceptions import AuthenticationError, NoPermissionError, RedisError, ResponseError
from redis.retry import Retry

from .errors import BrokerError
from .redis_fitness import INQUIRY, RedisUnfit, check_fitness

Command: TypeAlias = tuple[bytes | memoryview, ...]
Unit: TypeAlias = Sequence[Command]  # several commands are carried out together, or none of them

CONNECTING = 5.0  # seconds
SILENCE = 10.0  # seconds without a byte, in or out, after which a connection counts as lost
READ = 2**18  # bytes received at once
UNCOPIED = 2**16  # bytes of an argument from which on it is sent from where it lies

_LINE_END = b"\r\n"
_MISPLACED = ("WRONGTYPE", "MOVED", "CROSSSLOT")  # the keys are somebody else's, or elsewhere


class RedisAway(BrokerError):
    """A Redis server cannot be reached now, or the connection to it broke; it may come back."""


class RedisRefusal(BrokerError):
    """A Redis server did not carry out a command, and may do so later: it is full, or cannot write to its disk."""


class RedisLink:
    """A connection to the server at `url`: `redis://`, `rediss://` (TLS) or `unix://`. Made when first used.

    For one thread at a time. Raises `RedisUnfit` for a URL that cannot be understood.
    """

    def __init__(self, url: str) -> None:
        self.address = without_password(url)
        self.warnings: tuple[str, ...] = ()
        self._connection: Any = _connection(url, self.address)  # its methods have no types
        self._fit = False

    def exchange(self, units: Sequence[Unit]) -> list[list[Any] | RedisRefusal]:
        """Carries out the units, each as a whole. The answers of each, or why it was refused.

        An answer within a unit may be a `ResponseError`. Raises `RedisAway` if the connection breaks (nobody knows
        then what was carried out), `RedisUnfit` for what will not get better by itself.
        """
        if not self._fit:
            self._begin()
        return self._exchange(units)

    def ask(self, *command: bytes) -> Any:
        """The answer to one command. Raises `RedisRefusal` too."""
        (outcome,) = self.exchange([[command]])
        if isinstance(outcome, RedisRefusal):
            raise outcome
        return outcome[0]

    def check(self, answers: Sequence[Any]) -> None:
        """Checks what the server answered to `INQUIRY`. Raises `RedisUnfit`."""
        self.warnings = check_fitness(self.address, answers)

    def close(self) -> None:
        self._fit = False
        self._connection.disconnect()

    def _begin(self) -> None:
        (answers,) = self._exchange([INQUIRY])
        if isinstance(answers, RedisRefusal):
            raise answers
        self.check(answers)
        self._fit = True

    def _exchange(self, units: Sequence[Unit]) -> list[list[Any] | RedisRefusal]:
        try:
            self._connection.connect()
            self._connection.send_packed_command(_packed(units), check_health=False)
            return [self._outcome(unit) for unit in units]
        except BaseException as error:
            self.close()  # answers may still be under way
            if isinstance(error, (RedisError, OSError)):
                raise self._trouble(error) from error
            raise

    def _outcome(self, unit: Unit) -> list[Any] | RedisRefusal:
        if len(unit) == 1:
            answer = self._answer()
            return self._refusal(answer) if isinstance(answer, ResponseError) else [answer]
        queued = [self._answer() for _ in range(len(unit) + 1)]
        answers = self._answer()
        if answers is None:
            return RedisRefusal(f"Redis at {self.address} refuses: a watched key was changed by somebody else")
        if not isinstance(answers, ResponseError):
            return list(answers)
        reasons = [answer for answer in queued if isinstance(answer, ResponseError)]
        return self._refusal(reasons[0] if reasons else answers)

    def _answer(self) -> Any:
        try:
            return self._connection.read_response(disconnect_on_error=False)
        except ResponseError as error:
            return error

    def _refusal(self, error: ResponseError) -> RedisRefusal:
        """Raises `RedisUnfit` for a refusal for good."""
        text = str(error)
        if isinstance(error, NoPermissionError):
            raise RedisUnfit(f"the user of this run may not do all it needs at {self.address}: {text}")
        if text.startswith(_MISPLACED) or type(error).__name__ in ("MovedError", "ClusterCrossSlotError"):
            raise RedisUnfit(f"the keys of this run cannot be kept at {self.address}: {text}")
        return RedisRefusal(f"Redis at {self.address} refuses: {text}")

    def _trouble(self, error: RedisError | OSError) -> BrokerError:
        if isinstance(error, AuthenticationError):
            return RedisUnfit(
                f"Redis at {self.address} does not let this run in: {error}. Give user and password in the address, "
                "as in redis://user:password@host:6379/0"
            )
        if isinstance(error.__context__, ssl.SSLCertVerificationError):
            return RedisUnfit(
                f"the certificate of Redis at {self.address} is not trusted: {error}. Name the authority that signed "
                "it, as in rediss://host:6379/0?ssl_ca_certs=/path/to/ca.pem"
            )
        if isinstance(error, ResponseError):  # in the handshake: an unknown database, for example
            return RedisUnfit(f"Redis at {self.address} refuses the connection: {error}")
        return RedisAway(f"Redis at {self.address} cannot be reached: {error}")


def without_password(url: str) -> str:
    """The address for people: whatever is secret is left out."""
    parts = urlsplit(url)
    place = parts.netloc.rpartition("@")[2]
    return f"{parts.scheme}://{place}{parts.path}"


def _connection(url: str, address: str) -> AbstractConnection:
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


def _packed(units: Sequence[Unit]) -> list[bytes | memoryview]:
    """The units in Redis' own protocol; large arguments stay where they are."""
    chunks: list[bytes | memoryview] = []
    small = bytearray()
    for unit in units:
        for command in unit if len(unit) == 1 else [(b"MULTI",), *unit, (b"EXEC",)]:
            small += b"*%d\r\n" % len(command)
            for argument in command:
                small += b"$%d\r\n" % len(argument)
                if len(argument) < UNCOPIED:
                    small += argument
                else:
                    chunks += [bytes(small), argument]
                    small.clear()
                small += _LINE_END
    return [*chunks, bytes(small)]
