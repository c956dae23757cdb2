"""Keys of places, as the broker tells them, and what becomes of them once a machine's key is revoked."""

from dataclasses import replace

import pytest

from stageline.broker.control.messages import Assigned, FromBroker, Peers
from stageline.broker.control.place_keys import PlaceKeys
from stageline.broker.control.store import MemoryStore
from stageline.broker.coordinator.coordinator import Coordinator
from stageline.broker.coordinator.place_keys import shut_out
from stageline.broker.coordinator.run import RunConfig, run_of
from stageline.broker.keys.access import Access
from stageline.broker.keys.join_line import keyed, split_key
from stageline.broker.keys.pairs import KeyPair
from stageline.broker.keys.register import EnrolledKey, KeyRecord, KeyRegister
from support.conversation import PLAN, SNAPSHOTS, hello, name

OPEN = "tcp://0.0.0.0:0"
TERMS = replace(SNAPSHOTS, queues=OPEN)
KEY = b"k" * 32


class Talk:
    """Workers 0 and 1 that have joined, and what each was told."""

    def __init__(
        self, terms: RunConfig = TERMS, store: MemoryStore | None = None, key: bytes = KEY, now: float = 0.0
    ) -> None:
        self.store = store or MemoryStore()
        self.core = Coordinator(terms, self.store, run_of(self.store, PLAN, "run-1", key), now)
        self.told: dict[bytes, list[FromBroker]] = {name(0): [], name(1): []}

    def join(self) -> "Talk":
        for index in (0, 1):
            self.note(self.core.handle(name(index), hello(index), 1.0))
        for index in (0, 1):
            said = hello(index, incarnation=index + 1, endpoint=f"tcp://10.0.0.{index}:7000")
            self.note(self.core.handle(name(index), said, 1.0))
        return self

    def note(self, sends: list[tuple[bytes, FromBroker]]) -> None:
        for recipient, message in sends:
            self.told.setdefault(recipient, []).append(message)

    def revoke(self, index: int) -> None:
        for said in self.told.values():
            said.clear()
        self.note(shut_out(self.core.run, lambda sender: sender == name(index), 2.0))

    def hello_again(self, index: int) -> None:
        said = hello(index, incarnation=index + 1, endpoint=f"tcp://10.0.0.{index}:7000")
        self.note(self.core.handle(name(index), said, 2.0))

    def keys(self, index: int) -> PlaceKeys:
        """Those that it was told of last."""
        return [message.keys for message in self.told[name(index)] if isinstance(message, Assigned)][-1]

    def endpoints(self, index: int) -> dict[int, str]:
        peers = [message for message in self.told[name(index)] if isinstance(message, Peers)][-1]
        return {place: endpoint for place, (_, endpoint) in peers.workers.items()}


def test_places_have_keys_which_stand_in_the_endpoints_of_their_queues() -> None:
    talk = Talk().join()
    for index in (0, 1):
        pair = KeyPair.of_secret(talk.keys(index).secret)
        assert talk.keys(index).public[index] == pair.public.raw
        assert split_key(talk.endpoints(1 - index)[index]) == (f"tcp://10.0.0.{index}:7000", pair.public)
    assert talk.keys(0).public == talk.keys(1).public
    assert talk.keys(0).secret != talk.keys(1).secret


@pytest.mark.parametrize(
    ("queues", "insecure", "connections", "messages"),
    [
        (OPEN, False, True, False),
        (OPEN, True, False, False),
        ("tcp://127.0.0.1:0", False, False, False),
        ("shm://", False, False, False),
        ("redis://server:6379/0", False, False, True),
        ("rediss://server:6379/0", False, False, True),
        ("redis://server:6379/0", True, False, False),
        ("redis://127.0.0.1:6379/0", False, False, False),
        ("unix:///run/redis.sock", False, False, False),
    ],
)
def test_only_queues_that_others_reach_have_keys_and_none_where_they_would_be_told_in_clear(
    queues: str, insecure: bool, connections: bool, messages: bool
) -> None:
    keys = Talk(replace(TERMS, queues=queues, access=Access(insecure=insecure))).join().keys(0)
    assert (bool(keys.secret), bool(keys.salt)) == (connections, messages)
    assert len(keys.links[1]) == 32


def test_workers_of_a_broker_with_keys_have_keys_for_queues_at_addresses_that_the_brokers_plan_does_not_have() -> None:
    """The command lines of workers on two machines had the address of the queues alone: they went in clear."""
    talk = Talk(replace(TERMS, queues="shm://", access=Access(KeyRegister()))).join()
    assert talk.keys(0).secret
    assert talk.keys(0).salt  # for a server
    assert talk.endpoints(1)[0] == "tcp://10.0.0.0:7000"  # of a worker whose sockets have no keys: others refuse it
    own = KeyPair.of_secret(talk.keys(0).secret).public
    said = hello(0, incarnation=1, endpoint=keyed("tcp://10.0.0.0:7001", own))
    talk.note(talk.core.handle(name(0), said, 2.0))
    assert talk.endpoints(1)[0] == keyed("tcp://10.0.0.0:7001", own)


def test_a_replacement_has_the_keys_of_its_place() -> None:
    talk = Talk().join()
    before = talk.keys(1)
    for tenths in range(20, 130):  # worker 1 is silent for a lease
        talk.core.tick(tenths / 10)
    talk.note(talk.core.handle(b"another", hello(1), 13.0))
    (assigned,) = [message for message in talk.told[b"another"] if isinstance(message, Assigned)]
    assert assigned.incarnation > 2
    assert assigned.keys == before


def test_once_a_key_is_revoked_its_worker_loses_its_place_and_all_others_get_other_keys() -> None:
    talk = Talk().join()
    before = [talk.keys(index) for index in (0, 1)]
    talk.revoke(1)
    assert talk.told[name(0)] == talk.told[name(1)] == []  # before all have proven their keys again
    assert talk.core.run.registry.missing == [1]
    talk.hello_again(0)
    assert talk.keys(0).generation == before[0].generation + 1
    assert not {talk.keys(0).secret, *talk.keys(0).public, *talk.keys(0).links} & {
        before[0].secret, *before[0].public, *before[0].links[1:],
    }  # fmt: skip
    assert "speaks with a key that was revoked" in "\n".join(talk.core.run.events.infos)
    talk.note(talk.core.handle(b"another", hello(1), 3.0))
    (assigned,) = [message for message in talk.told[b"another"] if isinstance(message, Assigned)]
    assert assigned.keys.links[0] == talk.keys(0).links[1]


def test_a_broker_that_is_started_again_goes_on_with_the_newest_keys() -> None:
    talk = Talk().join()
    talk.revoke(1)
    talk.hello_again(0)
    again = Talk(store=talk.store, key=b"another")
    again.note(again.core.handle(name(0), hello(0, incarnation=1, endpoint="tcp://10.0.0.0:7000"), 3.0))
    assert again.keys(0) == talk.keys(0)


def test_a_broker_that_was_killed_right_after_it_had_revoked_a_key_is_followed_by_one_that_gives_others() -> None:
    talk = Talk().join()
    revoked = EnrolledKey(KeyPair.of_secret(b"s" * 32).public.text, 0.5, revoked=1.5)
    terms = replace(TERMS, access=Access(KeyRegister(KeyRecord(keys=(revoked,)))))
    for _ in range(2):  # once
        again = Talk(terms, talk.store, now=2.0)
        again.note(again.core.handle(name(0), hello(0, incarnation=1, endpoint="tcp://10.0.0.0:7000"), 3.0))
        assert again.keys(0).generation == 1


def test_a_run_that_cannot_replace_the_worker_ends_by_name() -> None:
    talk = Talk(replace(TERMS, restarts=0, snapshots=False)).join()
    talk.revoke(1)
    outcome = talk.core.run.outcome
    assert outcome is not None
    assert "worker 1 (stage 1)" in outcome.reason
    assert "speaks with a key that was revoked" in outcome.reason


def test_after_its_records_are_lost_a_broker_gives_keys_that_no_former_ones_are_mistaken_for() -> None:
    talk = Talk().join()
    talk.revoke(1)
    talk.core.run.registry.reset({}, 0, 10**6, 3.0)
    assert talk.core.run.registry.generation == 10**6
