"""Keys of the places: what each worker is told of them, and others for all once a machine must not take part.

In a run with parties the broker tells no secrets: only by which of its party's keys each place is met at present, which
every worker compares with its own plan.

A new generation of keys is stored before a worker is told of it. Running workers are told their places again when they
say Hello, and take over the keys that these bring.

`shut_out` ends a machine's part in a run: its workers lose their places. Nothing is told of the keys then: once the
channel has closed its connections, workers say Hello again, and get their places with the new keys, if their own key is
still admitted. What the machine knows is of no use: workers close connections with the former keys, and seal with the
new ones what lies at a server. A worker that keeps running does not go back for it.

Reads `config`, `keys`. Writes `registry`, and through `place` what follows from a loss.
"""

from collections.abc import Callable
from functools import lru_cache

from stageline.broker.control.messages import Hello, Peers
from stageline.broker.control.place_keys import PlaceKeys, QueueGuard
from stageline.broker.keys.join_line import keyed
from stageline.broker.keys.pairs import KeyPair, PublicKey
from stageline.broker.keys.parties import differences, party_at
from stageline.broker.ledger.losses import WorkerLoss
from stageline.pipeline.addresses import parted
from stageline.pipeline.errors import ExitCode
from stageline.pipeline.printable import bounded

from . import records
from .script_place import place_of
from .state import Outgoing, RunState

Endpoints = dict[int, tuple[int, str]]
REVOKED = "speaks with a key that was revoked"


def keys_of(run: RunState, index: int) -> PlaceKeys:
    """Return the keys of place `index`, in the present generation; none in a run without a key."""
    if not run.keys.key:
        return PlaceKeys()
    guard, generation = run.config.guard, run.registry.generation
    places = range(len(run.config.placement))
    if run.config.parties:
        used = tuple(_raw(key_in_use(run, place)) for place in places)
        return PlaceKeys(index, public=used, salt=run.keys.salt, generation=generation)
    has_pairs = guard is QueueGuard.CONNECTIONS or run.config.has_keys
    return PlaceKeys(
        index,
        tuple(b"" if other == index else run.keys.of_link(index, other, generation) for other in places),
        secret=run.keys.of_place(index, generation) if has_pairs else b"",
        public=tuple(_public(run, place).raw for place in places) if has_pairs else (),
        salt=run.keys.salt if guard is QueueGuard.MESSAGES or run.config.has_keys else b"",
        generation=generation,
    )


def endpoints(run: RunState) -> Endpoints:
    """Return the addresses of every worker's queues, with their public keys if connections have keys.

    A worker has its queues where its own plan says, which may be another address than in the broker's plan.
    """
    peers = run.registry.peers
    if run.config.parties:  # with the parties' keys, if any
        return peers
    all_keyed = run.config.guard is QueueGuard.CONNECTIONS
    if not (all_keyed or run.config.has_keys) or not run.keys.key:
        return peers
    return {
        index: (number, keyed(parted(at)[0], _public(run, index)) if all_keyed or parted(at)[1] else at)
        for index, (number, at) in peers.items()
    }


def peers_of(run: RunState) -> Peers:
    """Return what workers are told of each other."""
    notes = {each.index: each.notes for each in run.registry.members.values() if each.notes}
    return Peers(endpoints(run), run.config.parties, notes)


def other_parties(run: RunState, hello: Hello) -> str:
    """Return, for people, which parties a newcomer has otherwise than the broker; "" if it has the same.

    A worker that runs is told of the broker's parties, and keeps to its own.
    """
    if hello.incarnation or not (found := "; ".join(differences(hello.parties, run.config.parties))):
        return ""
    return bounded(f"{hello.name} has other parties than the broker: {found} (here: the worker, there: the broker)")


def key_in_use(run: RunState, place: int) -> str:
    """Return the text of the party's key that the process in a place has, or had last; "" for a place of no party."""
    party = party_at(run.config.parties, place)
    if party is None:
        return ""
    used = run.registry.party_keys.get(place, "")
    return used if used in party.keys else party.keys[0]


def note_key(run: RunState, place: int, key: str, now: float) -> bool:
    """Note by which key the process in a place is met. Returns True if it is another one, so that all must be told."""
    if not key or not run.config.parties:
        return False
    before = key_in_use(run, place)
    run.registry.party_keys[place] = key
    if key != before:
        run.registry.begin_generation(now)
    return key != before


def rotate(run: RunState, now: float) -> None:
    """Begin a new generation of keys, which is stored. Workers learn it with the answer to their next Hello."""
    run.registry.begin_generation(now)
    records.save(run)


def catch_up(run: RunState, now: float) -> None:
    """Begin a new generation if a former broker was killed after it had revoked a key, and before it had begun one."""
    register = run.config.access.register
    if register is not None and register.newest_revocation > run.registry.rekeyed:
        rotate(run, now)


def _raw(key: str) -> bytes:
    return PublicKey.parse(key).raw if key else b""


def _public(run: RunState, index: int) -> PublicKey:
    return _public_of(run.keys.of_place(index, run.registry.generation))


@lru_cache(4096)
def _public_of(secret: bytes) -> PublicKey:
    return KeyPair.of_secret(secret).public


def shut_out(run: RunState, is_out: Callable[[bytes], bool], now: float) -> list[Outgoing]:
    """Take the places of workers away, and begin other keys of all places. Return the messages to send.

    The caller closes all connections of the channel afterwards. A worker of the machine that is not known by an address
    cannot come back, and loses its place with its lease.

    Args:
        run: The state.
        is_out: Returns True if the process at an address of the channel must not take part any more.
        now: Seconds since the epoch.
    """
    run.outgoing.clear()
    if run.lifecycle.over:
        return []
    for member in [each for each in run.registry.reachable() if each.sender and is_out(each.sender)]:
        if why := place_of(run, member.index).lose(WorkerLoss(member, REVOKED), now):
            run.fail(why, ExitCode.FAILED)
    rotate(run, now)
    return list(run.outgoing)
