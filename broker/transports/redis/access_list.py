"""Access list of a Redis server for one run: a user for each party, who can do its own part and no other.

    user                may
    stageline-worker-N  put and take in the queues of place N, and exchange messages with the broker
    stageline-broker    have the broker's name and messages, keep its records, and remove the queues of a past run
    stageline-command   exchange messages with the broker, and read its records: `status`, `stop` and the others

Keys that a party only reads or only writes stand behind %R~ and %W~, of Redis 7 and Valkey.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace

from stageline.pipeline.addresses import masked, parted, transport_of
from stageline.pipeline.program import Queue

from . import RedisBackend
from .channel import broker_name
from .entries import Keys, layout, prefix

_GLOB = "*?[]^\\"
_ALL = "+auth +hello +ping +select +quit +client|setinfo +@transaction +info +type"
_CLIENT = "+get +rpush +ltrim +pexpire +blpop"
_QUEUES = "+get +set +del +exists +xadd +xtrim +xlen +xread +xrevrange"
_MEETING = "+get +set +del +pexpire +rpush +ltrim +lpop +blpop"
_RECORDS = "+get +set +del +hset +hsetnx +hget +hmget +hgetall +hdel"
_REMOVING = "+scan +unlink"
_READING = "+get +hget +hgetall"


@dataclass(frozen=True, slots=True)
class ServerUse:
    """Use that a run makes of one server.

    Attributes:
        run: Pattern of the run's id.
        broker: Name of the broker; None if it is not met there.
        has_queues: True if the queues are there.
        has_records: True if the broker's records are there.
    """

    run: str
    broker: str | None = None
    has_queues: bool = False
    has_records: bool = False


def uses(run: str, queues: str, broker: str, records: str) -> Mapping[str, ServerUse]:
    """Return what a run has at each Redis server, by the server's address, without passwords.

    Args:
        run: Pattern of the run's id.
        queues: Address of the queues.
        broker: Address of the broker.
        records: Address of the broker's records.
    """
    found: dict[str, ServerUse] = {}
    met = broker_name(parted(broker)[0])
    for url, has in ((queues, {"has_queues": True}), (broker, {"broker": met}), (records, {"has_records": True})):
        if isinstance(transport_of(url), RedisBackend):
            address = masked(url.partition("#")[0])
            found[address] = replace(found.get(address, ServerUse(run)), **has)
    return found


def access_list(use: ServerUse, queues: Collection[Queue], workers: int) -> Iterator[str]:
    """Yield a command for each user, with PASSWORD-OF-USER in place of the password.

    Args:
        use: What the run has at the server.
        queues: Queues of the run's program.
        workers: Number of workers.
    """
    for worker in range(workers):
        if rules := [*_of_queues(use, queues, worker), *_of_client(use)]:
            yield _user(f"worker-{worker}", rules)
    if rules := _of_broker(use):
        yield _user("broker", rules)
    if rules := [*_of_client(use), *_of_reader(use)]:
        yield _user("command", rules)


def pattern(name: str) -> str:
    """Return a pattern that fits this name alone."""
    return "".join(f"\\{sign}" if sign in _GLOB else sign for sign in name)


def _user(name: str, rules: list[str]) -> str:
    keys = sorted({rule for rule in rules if "~" in rule})
    commands = dict.fromkeys(word for rule in rules if "~" not in rule for word in rule.split())
    user = f"stageline-{name}"
    return " ".join(("ACL SETUSER", user, "reset", "on", f">PASSWORD-OF-{user}", *keys, "-@all", _ALL, *commands))


def _of_queues(use: ServerUse, queues: Collection[Queue], worker: int) -> list[str]:
    if not use.has_queues:
        return []
    own = [each for each in queues if worker in (each.producer, each.consumer) and not each.is_local]
    ends = [Keys(use.run, pattern(each.name)) for each in own]
    keys = [key for each in ends for key in (each.entries, each.kept, each.taken)]
    return [_QUEUES, *(f"~{key.decode()}" for key in (layout(use.run)[0], *keys))]


def _of_client(use: ServerUse) -> list[str]:
    if use.broker is None:
        return []
    place = prefix(pattern(use.broker))
    return [_CLIENT, f"%R~{place}broker", f"%W~{place}to-broker", f"~{place}to:*"]


def _of_broker(use: ServerUse) -> list[str]:
    met = [] if use.broker is None else [_MEETING, f"~{prefix(pattern(use.broker))}*"]
    kept = [_RECORDS, f"~{prefix(use.run)}store:*"] if use.has_records else []
    return [*met, *kept, *([_REMOVING, f"~{prefix(use.run)}*"] if use.has_queues else [])]


def _of_reader(use: ServerUse) -> list[str]:
    return [_READING, f"%R~{prefix(use.run)}store:*"] if use.has_records else []
