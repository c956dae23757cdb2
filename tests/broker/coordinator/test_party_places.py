"""A broker of a run with parties tells no secret: by which key each place is met, and to all when that changes."""

from dataclasses import replace

import msgspec
import pytest

from stageline.broker.control.messages import Assigned, FromBroker, Hello, Peers, Refused
from stageline.broker.control.place_keys import PlaceKeys
from stageline.broker.control.records import WorkerRecord
from stageline.broker.control.store import MemoryStore
from stageline.broker.coordinator.coordinator import Coordinator
from stageline.broker.coordinator.place_keys import shut_out
from stageline.broker.coordinator.run import run_of
from stageline.broker.keys.access import Access
from stageline.broker.keys.pairs import KeyPair
from stageline.broker.keys.parties import Parties, Party
from stageline.broker.keys.register import KeyRegister
from stageline.pipeline.errors import ExitCode
from support.conversation import PLAN, SNAPSHOTS, hello, name

HOSPITAL, LAB, NEXT = (KeyPair.of_secret(bytes([each]) * 32).public for each in (1, 2, 3))
LISTED: Parties = (
    Party("hospital", (HOSPITAL.text,), (0,)),
    Party("lab", (LAB.text, NEXT.text), (1,)),
)
NOTE = {LAB.text: b"sealed"}


class PartyRun:
    """A broker of the two parties, and what each worker was told."""

    def __init__(self, store: MemoryStore | None = None) -> None:
        self.store = store or MemoryStore()
        register = KeyRegister()
        register.list_parties(LISTED, 0.0)
        terms = replace(SNAPSHOTS, queues="tcp://0.0.0.0:0", access=Access(register))
        self.core = Coordinator(terms, self.store, run_of(self.store, PLAN, "run-1", b"k" * 32), 0.0)
        self.told: dict[bytes, list[FromBroker]] = {}

    def says(self, sender: bytes, message: Hello, now: float = 1.0) -> None:
        for recipient, told in self.core.handle(sender, message, now):
            self.told.setdefault(recipient, []).append(told)

    def joins(self, index: int, key: str, sender: bytes = b"", now: float = 1.0, parties: Parties = LISTED) -> None:
        sender = sender or name(index)
        self.says(sender, replaced(hello(index), key, parties), now)
        placed = [each for each in self.told[sender] if isinstance(each, Assigned)]
        if placed:
            at = {"incarnation": placed[-1].incarnation, "endpoint": f"tcp://10.0.0.{index}:7000#{key}"}
            self.says(sender, replaced(hello(index, **at), key, parties, NOTE), now)

    def passes(self, now: float) -> None:
        """Time passes."""
        for recipient, told in self.core.tick(now):
            self.told.setdefault(recipient, []).append(told)

    def has_placed(self, index: int) -> bool:
        return any(isinstance(each, Assigned) for each in self.told.get(name(index), []))

    def keys(self, sender: bytes) -> PlaceKeys:
        return [each.keys for each in self.told[sender] if isinstance(each, Assigned)][-1]

    def peers(self, sender: bytes) -> Peers:
        return [each for each in self.told[sender] if isinstance(each, Peers)][-1]


def replaced(said: Hello, key: str, parties: Parties, notes: dict[str, bytes] | None = None) -> Hello:
    return msgspec.structs.replace(said, key=key, parties=parties, notes=notes or {})


@pytest.fixture
def run() -> PartyRun:
    made = PartyRun()
    made.joins(0, HOSPITAL.text)
    made.joins(1, LAB.text)
    return made


def test_the_broker_tells_keys_notes_and_parties_and_no_secret(run: PartyRun) -> None:
    keys = run.keys(name(0))
    assert (keys.secret, keys.links) == (b"", ())
    assert keys.public == (HOSPITAL.raw, LAB.raw)
    assert keys.salt == run.keys(name(1)).salt != b""
    peers = run.peers(name(0))
    assert (peers.parties, peers.notes) == (LISTED, {0: NOTE, 1: NOTE})
    assert peers.workers[1][1] == f"tcp://10.0.0.1:7000#{LAB.text}"


def test_a_replacement_with_the_partys_other_key_is_told_to_all_as_a_new_generation(run: PartyRun) -> None:
    shut_out(run.core.run, lambda sender: sender == name(1), 2.0)
    run.says(name(0), replaced(hello(0, incarnation=1, endpoint="tcp://10.0.0.0:7000"), HOSPITAL.text, LISTED), 2.0)
    before = run.keys(name(0))
    run.told.clear()
    run.joins(1, NEXT.text, b"another", 3.0)
    after = run.keys(name(0))
    assert (before.public[1], after.public[1]) == (LAB.raw, NEXT.raw)
    assert after.generation == run.keys(b"another").generation == before.generation + 1
    again = PartyRun(run.store)
    again.says(name(0), replaced(hello(0, incarnation=1, endpoint="tcp://10.0.0.0:7000"), HOSPITAL.text, LISTED), 4.0)
    assert again.keys(name(0)) == after


def test_after_lost_records_all_are_told_the_other_key_of_a_party_whose_worker_uses_it() -> None:
    """The first key was told, and no queue to that place opened any more."""
    run, now = PartyRun(), 1.0
    keys = HOSPITAL.text, NEXT.text
    while not all(run.has_placed(index) for index in (0, 1)) and now < 100.0:
        for index, key in enumerate(keys):
            at = {"incarnation": 10**9 + index, "endpoint": f"tcp://10.0.0.{index}:7000#{key}"}
            knows = WorkerRecord("run-1", index, 0, 0)
            said = msgspec.structs.replace(hello(index, **at), memory=knows, snapshots=[])
            run.says(name(index), replaced(said, key, LISTED), now)
        now += 1.0
        run.passes(now)
    for index in (0, 1):
        assert run.keys(name(index)).public == (HOSPITAL.raw, NEXT.raw)
    assert PartyRun(run.store).core.run.registry.party_keys == {0: HOSPITAL.text, 1: NEXT.text}


def test_a_newcomer_with_other_parties_is_refused_by_name_and_one_that_runs_is_not(run: PartyRun) -> None:
    other = (LISTED[0], Party("lab", (NEXT.text,), (1,)))
    run.joins(1, NEXT.text, b"newcomer", 2.0, other)
    (refused,) = run.told[b"newcomer"]
    assert isinstance(refused, Refused)
    assert refused.code == ExitCode.REFUSED
    for part in ("has other parties than the broker: party lab (digest ", NEXT.short, LAB.short):
        assert part in refused.reason
    run.told.clear()
    run.says(name(1), replaced(hello(1, incarnation=2, endpoint="tcp://10.0.0.1:7000"), LAB.text, other), 2.0)
    assert run.keys(name(1)).public[0] == HOSPITAL.raw
