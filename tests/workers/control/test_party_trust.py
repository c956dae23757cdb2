"""A worker believes its own plan about the other parties: a broker that says otherwise is named, and gets nothing."""

import os
from collections.abc import Mapping
from contextlib import ExitStack, closing

import msgspec
import pytest
import structlog

from stageline.broker.control.messages import CONTROL_VERSION, Assigned, Hello, Peers
from stageline.broker.control.place_keys import PlaceKeys
from stageline.broker.keys.admission import QueueKeys
from stageline.broker.keys.join_line import keyed
from stageline.broker.keys.pairs import KeyPair
from stageline.broker.keys.parties import Parties, Party
from stageline.broker.keys.party_secrets import PartyNote, sealed_note
from stageline.broker.queues.ends import QueueOptions
from stageline.broker.queues.secrets import PlacesAdmitted, QueueSecrets, secrets_of
from stageline.broker.transports.sockets.zeromq_queues import ZeroMQQueues
from stageline.pipeline.errors import ExitCode
from stageline.pipeline.program import Queue
from stageline.workers.control.party_trust import PartiesDiffer, PartyTrust
from support.keyed import BROKER, OTHER, STRANGER, WORKER
from support.payloads import message

HOSPITAL, LAB = WORKER, OTHER
RUN, SALT, DIGEST = "run-1", b"salt" * 8, "d" * 64
AT = {0: "tcp://10.0.0.1:7000", 1: "tcp://10.0.0.2:7000"}
FORWARD = Queue(name="forward-1", producer=0, consumer=1, window=64)


def listed(hospital: KeyPair = HOSPITAL, *lab: KeyPair) -> Parties:
    keys = tuple(pair.public.text for pair in lab or (LAB,))
    return Party("hospital", (hospital.public.text,), (0,)), Party("lab", keys, (1,))


class PlannedWorker:
    """The worker in a place, with a plan of its own."""

    def __init__(self, index: int, pair: KeyPair, parties: Parties | None = None, plan: str = DIGEST) -> None:
        self.index = index
        self.trust = PartyTrust(parties or listed(), plan, pair)

    def placed(self, *pairs: KeyPair, run: str = RUN, salt: bytes = SALT, generation: int = 0) -> Assigned:
        """The place, after the broker has told that the places are met by the keys of `pairs`."""
        public = tuple(pair.public.raw for pair in pairs or (HOSPITAL, LAB))
        return self.given(PlaceKeys(self.index, (), b"", public, salt, generation), run)

    def given(self, keys: PlaceKeys, run: str = RUN) -> Assigned:
        """The place, after the broker has told `keys`."""
        found = self.trust.received(Assigned(run, self.index, 1 + self.index, 0, keys=keys))
        assert isinstance(found, Assigned)
        return found

    def notes(self) -> dict[str, bytes]:
        hello = Hello(CONTROL_VERSION, DIGEST, "worker", "host", 1, AT[self.index], self.index)
        return self.trust.introduced(hello).notes

    def told(self, peers: Peers) -> Peers:
        found = self.trust.received(peers)
        assert isinstance(found, Peers)
        return found


def peers(
    notes: Mapping[int, dict[str, bytes]],
    parties: Parties | None = None,
    lab: KeyPair = LAB,
    hospital: KeyPair = HOSPITAL,
) -> Peers:
    there = {0: (1, keyed(AT[0], hospital.public)), 1: (2, keyed(AT[1], lab.public))}
    return Peers(there, parties or listed(), dict(notes))


@pytest.fixture
def two() -> tuple[PlannedWorker, PlannedWorker]:
    hospital, lab = PlannedWorker(0, HOSPITAL), PlannedWorker(1, LAB)
    hospital.placed(), lab.placed()
    return hospital, lab


def test_both_ends_make_the_same_secret_which_needs_the_key_of_one_of_them(
    two: tuple[PlannedWorker, PlannedWorker],
) -> None:
    ours, theirs = two[0].placed().keys, two[1].placed().keys
    assert ours.links[1] == theirs.links[0]
    assert ours.of_queue(FORWARD) == theirs.of_queue(FORWARD)
    by_broker = PlannedWorker(0, BROKER, listed(BROKER)).placed(BROKER, LAB)
    assert by_broker.keys.links[1] != ours.links[1]
    others = [
        two[0].placed(run="run-2"),
        two[0].placed(salt=b"other" + SALT[5:]),
        two[0].placed(generation=1),
    ]
    assert len({ours.links[1], *(each.keys.links[1] for each in others)}) == 4


def test_another_machine_of_a_party_makes_the_same_secrets_and_two_places_of_one_have_a_link() -> None:
    assert PlannedWorker(1, LAB).placed().keys == PlannedWorker(1, LAB).placed().keys
    both = (Party("hospital", (HOSPITAL.public.text,), (0, 1)),)
    first, second = (PlannedWorker(index, HOSPITAL, both).placed(HOSPITAL, HOSPITAL) for index in (0, 1))
    assert first.keys.links[1] == second.keys.links[0]
    assert first.keys.name != second.keys.name  # by which a relay tells them apart


def test_a_broker_that_names_a_key_which_the_plan_does_not_list_is_left_with_the_name_of_the_party() -> None:
    with pytest.raises(PartiesDiffer) as refused:
        PlannedWorker(0, HOSPITAL).placed(HOSPITAL, BROKER)
    assert refused.value.exit_code == ExitCode.REFUSED
    for part in ("worker 1, of party lab", BROKER.public.text, LAB.public.text, "ask lab which is right"):
        assert part in str(refused.value)


def test_a_broker_gives_no_place_of_another_party() -> None:
    with pytest.raises(PartiesDiffer, match="gives place 1, which is of party lab"):
        PlannedWorker(1, HOSPITAL).placed()


PUBLIC = HOSPITAL.public.raw, LAB.public.raw
UNFIT = {
    "no salt": PlaceKeys(public=PUBLIC),
    "short salt": PlaceKeys(public=PUBLIC, salt=SALT[:31]),
    "no keys": PlaceKeys(salt=SALT),
    "one key": PlaceKeys(public=PUBLIC[:1], salt=SALT),
    "nothing": PlaceKeys(),
}


@pytest.mark.parametrize("keys", UNFIT.values(), ids=UNFIT.keys())
def test_a_broker_that_tells_less_than_seals_need_gets_no_worker_and_takes_no_seal_from_one_that_has_begun(
    keys: PlaceKeys,
) -> None:
    """With an empty salt both ends wrote clear tensors to the server."""
    hospital, lab = PlannedWorker(0, HOSPITAL), PlannedWorker(1, LAB)
    with pytest.raises(PartiesDiffer, match=r"the broker tells (0 bytes of salt|31 bytes of salt|no key of worker)"):
        hospital.given(keys)
    before = hospital.placed()
    lab.placed()
    hospital.told(peers({1: lab.notes()}))
    with structlog.testing.capture_logs() as logs:
        after = hospital.given(keys)
    assert after.keys == before.keys
    assert secrets_of([FORWARD], after).sealing_of is not None
    assert "not believed: the broker tells" in logs[0]["event"]


def test_a_worker_that_has_no_place_yet_has_not_begun_whatever_the_broker_tells_first() -> None:
    hospital = PlannedWorker(0, HOSPITAL)
    hospital.told(Peers({}, listed()))
    with pytest.raises(PartiesDiffer, match="0 bytes of salt"):
        hospital.given(PlaceKeys(public=PUBLIC))


def test_a_worker_whose_place_is_told_to_have_the_partys_other_key_says_so() -> None:
    with pytest.raises(PartiesDiffer, match=f"worker 1, this process, has another key .*{LAB.public.text}"):
        PlannedWorker(1, LAB, listed(HOSPITAL, LAB, STRANGER)).placed(HOSPITAL, STRANGER)


def test_workers_with_the_same_plan_connect(two: tuple[PlannedWorker, PlannedWorker]) -> None:
    told = peers({member.index: member.notes() for member in two})
    assert [set(member.told(told).workers) for member in two] == [{0, 1}, {0, 1}]


@pytest.mark.parametrize(
    ("plan", "parties", "said"),
    [
        (
            "e" * 64,
            listed(),
            "worker 1, of party lab, has another plan: its digest is eeeeeeeeeeee there, dddddddddddd here",
        ),
        (DIGEST, (*listed(), Party("clinic", (STRANGER.public.text,))), "party clinic .*: only the plan there has it"),
    ],
)
def test_what_differs_in_another_workers_plan_is_named(plan: str, parties: Parties, said: str) -> None:
    hospital, lab = PlannedWorker(0, HOSPITAL), PlannedWorker(1, LAB, parties, plan)
    hospital.placed(), lab.placed()
    with pytest.raises(PartiesDiffer, match=said):
        hospital.told(peers({1: lab.notes()}))


def test_while_a_party_changes_its_key_a_common_one_is_enough_and_the_difference_is_said() -> None:
    hospital, lab = PlannedWorker(0, HOSPITAL), PlannedWorker(1, LAB, listed(HOSPITAL, LAB, STRANGER))
    hospital.placed(), lab.placed()
    with structlog.testing.capture_logs() as logs:
        assert set(hospital.told(peers({1: lab.notes()})).workers) == {0, 1}
    assert "worker 1, of party lab, has other parties: party lab" in logs[0]["event"]
    new = PlannedWorker(0, HOSPITAL, listed(HOSPITAL, LAB, STRANGER)).placed(HOSPITAL, STRANGER).keys
    assert (
        new.links[1]
        == PlannedWorker(1, STRANGER, listed(HOSPITAL, LAB, STRANGER)).placed(HOSPITAL, STRANGER).keys.links[0]
    )
    assert new.links[1] != hospital.placed().keys.links[1]


def test_notes_that_the_broker_keeps_back_makes_mixes_up_or_sends_back_are_no_notes(
    two: tuple[PlannedWorker, PlannedWorker],
) -> None:
    hospital, lab = two
    own, terms = HOSPITAL.public.text, PartyNote(RUN, 1, DIGEST, listed())
    sound = lab.notes()
    former = PlannedWorker(1, LAB)
    former.placed(run="run-0")
    for notes, said in [
        ({}, "has told nothing that the key of this machine"),
        ({own: sealed_note(BROKER, HOSPITAL.public, terms, os.urandom)}, "is not sealed with that party's key"),
        ({own: sound[own][:-1] + bytes([sound[own][-1] ^ 1])}, "is not sealed with that party's key"),
        ({own: hospital.notes()[own]}, "is not sealed with that party's key"),
        ({own: former.notes()[own]}, "is of worker 1 of run run-0"),
    ]:
        with pytest.raises(PartiesDiffer, match=said):
            hospital.told(peers({1: notes}))


def test_an_address_with_the_brokers_own_key_is_not_dialled(two: tuple[PlannedWorker, PlannedWorker]) -> None:
    with pytest.raises(PartiesDiffer, match="worker 1, of party lab, has the key"):
        two[0].told(peers({1: two[1].notes()}, lab=BROKER))


def test_a_worker_that_has_begun_says_what_it_does_not_believe_and_goes_on_without_it(
    two: tuple[PlannedWorker, PlannedWorker],
) -> None:
    hospital, lab = two
    before = hospital.placed().keys
    sound = {1: lab.notes()}
    hospital.told(peers(sound))
    with structlog.testing.capture_logs() as logs:
        for _ in range(2):  # each is said once
            assert hospital.placed(HOSPITAL, BROKER).keys == before
            assert set(hospital.told(peers(sound, lab=BROKER)).workers) == {0}
            assert set(hospital.told(peers(sound, listed(HOSPITAL, BROKER))).workers) == {0, 1}
    said = [each["event"] for each in logs]
    assert len(said) == 2
    assert all("not believed: the broker" in each and "party lab" in each for each in said)


def test_what_the_broker_knows_neither_opens_nor_writes_a_queue(two: tuple[PlannedWorker, PlannedWorker]) -> None:
    """It knows the run, the salt, the generation, every public key and endpoint, and has a key pair of its own."""
    hospital, lab = (member.placed() for member in two)
    told = msgspec.structs.replace(hospital.keys, secret=b"", links=())
    assert LAB.secret not in msgspec.msgpack.encode(told)
    admits = PlacesAdmitted(frozenset(hospital.keys.public))
    guesses = PlannedWorker(1, BROKER, listed(HOSPITAL, BROKER)).placed(HOSPITAL, BROKER)
    posing = QueueSecrets(guesses.keys.of_requests([FORWARD]), QueueKeys(BROKER, admits))
    with ExitStack() as stack:

        def queues(incarnation: int, secrets: QueueSecrets) -> ZeroMQQueues:
            made = ZeroMQQueues(RUN, incarnation, "tcp://127.0.0.1:0", QueueOptions(secrets=secrets))
            return stack.enter_context(closing(made))

        here, there = queues(1, secrets_of([FORWARD], hospital)), queues(2, secrets_of([FORWARD], lab))
        middle = queues(3, posing)
        outbound = here.outbound(FORWARD)
        middle.connect({FORWARD: here.endpoint})
        middle.inbound(FORWARD).rewind(0)
        outbound.put(message((0.5,), queue=FORWARD.name, number=0, run=RUN))
        here.pump(0.3)
        assert middle.inbound(FORWARD).take(0.5) is None
        middle.outbound(FORWARD).put(message((0.25,), queue=FORWARD.name, number=0, run=RUN))
        there.connect({FORWARD: keyed(middle.endpoint.partition("#")[0], HOSPITAL.public)})
        inbound = there.inbound(FORWARD)
        inbound.rewind(0)
        middle.pump(0.3)
        assert inbound.take(0.5) is None
        there.connect({FORWARD: here.endpoint})
        for _ in range(600):  # a minute at most
            here.pump(0.1)
            if (taken := inbound.take(0.1)) is not None:
                break
        assert taken is not None
        assert taken.payload == (0.5,)
