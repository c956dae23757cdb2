"""Keys of the places: what each worker is told of them, and others for all once a machine must not take part.

A new generation of keys is stored before a worker is told of it. Running workers are told their places again when they
say Hello, and take over the keys that these bring.

Reads `config`, `keys`. Writes `registry`.
"""

from functools import lru_cache

from stageline.broker.control.place_keys import PlaceKeys
from stageline.broker.keys.join_line import keyed
from stageline.broker.keys.pairs import KeyPair, PublicKey
from stageline.broker.keys.queue_guard import QueueGuard
from stageline.pipeline.addresses import parted

from . import records
from .state import RunState

Endpoints = dict[int, tuple[int, str]]


def keys_of(run: RunState, index: int) -> PlaceKeys:
    """Return the keys of place `index`, in the present generation; none in a run without a key."""
    if not run.keys.key:
        return PlaceKeys()
    guard, generation = run.config.guard, run.registry.generation
    places = range(len(run.config.placement))
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
    all_keyed = run.config.guard is QueueGuard.CONNECTIONS
    if not (all_keyed or run.config.has_keys) or not run.keys.key:
        return peers
    return {
        index: (number, keyed(parted(at)[0], _public(run, index)) if all_keyed or parted(at)[1] else at)
        for index, (number, at) in peers.items()
    }


def rotate(run: RunState, now: float) -> None:
    """Begin a new generation of keys, which is stored. Workers learn it with the answer to their next Hello."""
    run.registry.begin_generation(now)
    records.save(run)


def catch_up(run: RunState, now: float) -> None:
    """Begin a new generation if a former broker was killed after it had revoked a key, and before it had begun one."""
    register = run.config.access.register
    if register is not None and register.newest_revocation > run.registry.rekeyed:
        rotate(run, now)


def _public(run: RunState, index: int) -> PublicKey:
    return _public_of(run.keys.of_place(index, run.registry.generation))


@lru_cache(4096)
def _public_of(secret: bytes) -> PublicKey:
    return KeyPair.of_secret(secret).public
