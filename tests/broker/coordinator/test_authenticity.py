"""Strangers at the broker's address: they know all that `status` tells, and have recorded what others sent."""

import msgspec
import pytest

from stageline.broker.control.channel import LARGEST_UNPROVEN
from stageline.broker.control.leaves import LeaveWorker
from stageline.broker.control.messages import (
    Answer,
    Ask,
    Assigned,
    Exited,
    Failed,
    Finished,
    Goodbye,
    Hello,
    Peers,
    Refused,
    Report,
    Standby,
    StopRun,
    ToBroker,
)
from stageline.broker.control.protocol import RunKeys, decode_to_broker, encode
from stageline.broker.control.records import WorkerRecord
from stageline.broker.control.store import MemoryStore
from stageline.broker.coordinator.coordinator import QUESTIONS, Coordinator, Reception
from stageline.broker.coordinator.records import facts_of
from stageline.broker.coordinator.run import RunConfig, run_of
from stageline.broker.coordinator.state import Life
from stageline.broker.errors import BadMessage
from stageline.broker.ledger.losses import MOST
from support.conversation import PLAN, SNAPSHOTS, TERMS, finished, hello, name, report, steps

KEYS = RunKeys("run-1", b"k" * 32)
STRANGER = b"stranger"
REMEMBERED = WorkerRecord("run-1", 0, 4000, 4000)


class SealedConversation:
    """A broker's coordinator behind the wire, workers 0 and 1 that have joined, and what was recorded of them."""

    def __init__(
        self, terms: RunConfig = TERMS, store: MemoryStore | None = None, *, key: bytes = KEYS.key, new: bool = True
    ) -> None:
        self.terms = terms
        self.store = store or MemoryStore()
        self.now = 0.0
        self.serial = 0
        self.recorded: list[bytes] = []
        self.core = Coordinator(terms, self.store, run_of(self.store, PLAN, KEYS.run, key, new=new), self.now)

    def join(self) -> "SealedConversation":
        for index in range(2):
            self.say(name(index), hello(index))
            self.say(name(index), hello(index, incarnation=index + 1, endpoint=f"ipc://{index}"))
        assert self.core.run.registry.begun
        return self

    def say(self, sender: bytes, message: ToBroker, secret: bytes | None = None) -> Reception:
        """Message of a worker, sealed as it must be, or with another secret."""
        self.serial += 1
        incarnation = getattr(message, "incarnation", 0)
        own = self.core.run.keys.of_incarnation(incarnation) if incarnation else b""
        return self.carry(sender, encode(message, own if secret is None else secret, self.serial))

    def carry(self, sender: bytes, frame: bytes) -> Reception:
        self.recorded.append(frame)
        self.now += 0.01
        return self.core.receive(sender, decode_to_broker(frame), self.now)

    def state(self) -> object:
        """All that a message could change, but for the count of refusals and the time."""
        run = self.core.run
        members = [
            (each.index, each.sender, each.endpoint, each.last_seen, each.status, each.exited, each.report)
            for each in run.registry.members.values()
        ]
        return members, facts_of(run), run.lifecycle.state, list(run.ledger.finished), run.standby.copy(), run.outcome


FORGED: list[ToBroker] = [
    StopRun("enough"),
    StopRun("enough", over=True),
    LeaveWorker("eve", 0, 1.0),
    Exited(0, 100, -9),
    hello(0, incarnation=1, endpoint="tcp://192.0.2.1:1"),
    msgspec.structs.replace(hello(0, incarnation=2**53 - 1), memory=REMEMBERED),
    msgspec.structs.replace(hello(0, incarnation=1), memory=REMEMBERED),
    report(0, actions=9, training_steps=5, snapshots=[(0, 4037)], complete=4037, number=7),
    Failed(1, "so it is", 0),
    Failed(1, "so it is", 78),
    Finished(1, {}),
    Goodbye(1, "bye"),
]


@pytest.mark.parametrize("terms", [TERMS, SNAPSHOTS], ids=["without recovery", "with recovery"])
@pytest.mark.parametrize(
    "secret", [b"", b"x" * 32, KEYS.of_incarnation(2), KEYS.of_link(0, 1)], ids=lambda key: key[:2]
)
@pytest.mark.parametrize("forged", FORGED, ids=lambda message: type(message).__name__)
def test_a_message_without_its_secret_changes_nothing(forged: ToBroker, secret: bytes, terms: RunConfig) -> None:
    """StopRun(code=0) made broker and workers exit 0, Hello moved a live worker's endpoint, Report completed checkpoint
    4037 of a run at step 40, Exited emptied a live worker's place."""
    wire = SealedConversation(terms).join()
    before = wire.state()
    reception = wire.say(STRANGER, forged, secret)
    assert not reception.trusted
    assert all(to == STRANGER and isinstance(message, Refused) for to, message in reception.outgoing)
    assert wire.state() == before
    assert wire.core.run.events.anomalies["forged"] == 1
    assert wire.core.run.events.warnings[-1].startswith(f"refused: {type(forged).__name__} ")


@pytest.mark.parametrize("terms", [TERMS, SNAPSHOTS], ids=["without recovery", "with recovery"])
def test_what_was_recorded_and_is_sent_again_changes_nothing(terms: RunConfig) -> None:
    wire = SealedConversation(terms).join()
    for index in range(2):
        wire.say(name(index), report(index, actions=3, number=1))
    sealed = [frame for frame in wire.recorded if decode_to_broker(frame).seal.is_of(KEYS.of_incarnation(1))]
    assert len(sealed) == 2
    before = wire.state()
    for frame in sealed:
        assert not wire.carry(STRANGER, frame).trusted
    assert wire.state() == before
    assert wire.core.run.events.anomalies["forged"] == 2


def test_an_exit_that_was_recorded_does_not_empty_the_place_again() -> None:
    wire = SealedConversation(SNAPSHOTS).join()
    wire.say(b"train", Exited(0, 77, -9), KEYS.of_control)
    before = wire.state()
    wire.carry(STRANGER, wire.recorded[-1])
    assert wire.state() == before


def test_an_altered_message_is_refused_whatever_was_altered() -> None:
    wire = SealedConversation().join()
    wire.say(name(0), report(0, number=1))
    frame, before = wire.recorded[-1], wire.state()
    genuine = decode_to_broker(frame)
    moved = encode(msgspec.structs.replace(genuine.message, actions=4), b"", genuine.seal.serial + 1)  # type: ignore[type-var]
    altered = moved[:4] + genuine.seal.tag + moved[20:]
    with pytest.raises(Exception, match="damaged"):
        wire.carry(STRANGER, altered)
    assert wire.state() == before


def test_a_worker_proves_itself_and_is_trusted() -> None:
    wire = SealedConversation().join()
    assert wire.say(name(0), report(0, number=1)).trusted
    assert wire.say(name(1), finished(1)).trusted
    assert "forged" not in wire.core.run.events.anomalies


def test_the_supervisor_stops_the_run_with_the_runs_secret() -> None:
    wire = SealedConversation().join()
    assert wire.say(b"train", StopRun("interrupted"), KEYS.of_control).trusted
    assert wire.core.run.outcome is not None
    assert wire.core.run.outcome.code == 130


@pytest.mark.parametrize(("secret", "trusted"), [(b"", False), (b"x" * 32, False), (KEYS.of_control, True)])
def test_a_question_is_answered_and_trusted_only_with_the_runs_secret(secret: bytes, trusted: bool) -> None:
    wire = SealedConversation().join()
    reception = wire.say(STRANGER, Ask("status"), secret)
    assert isinstance(reception.outgoing[0][1], Answer)
    assert reception.trusted is trusted


def test_a_newcomer_is_trusted_with_a_place_and_not_when_it_is_refused() -> None:
    wire = SealedConversation()
    assert wire.say(name(0), hello(0)).trusted
    assert not wire.say(STRANGER, hello(1, plan="e" * 64)).trusted


def test_a_place_comes_with_its_secret_once_and_to_the_process_that_has_it() -> None:
    """A process that knows a worker's name, host and pid, which `status` tells, was given its place again."""
    wire = SealedConversation()
    mine = msgspec.structs.replace(hello(0), token="a" * 32)
    for _ in range(2):  # the first answer may be lost
        ((_, place),) = wire.say(name(0), mine).outgoing
        wire.core.tick(wire.now)
        assert isinstance(place, Assigned)
        assert (place.secret, place.keys.links) == (KEYS.of_incarnation(1), (b"", KEYS.of_link(0, 1)))
    for other in (hello(0), msgspec.structs.replace(hello(0), token="b" * 32)):
        assert all(not isinstance(message, Assigned) for _, message in wire.say(STRANGER, other).outgoing)
    ((_, again),) = wire.say(name(0), hello(0, incarnation=1, endpoint="ipc://0")).outgoing
    assert isinstance(again, Assigned)
    assert again.secret == b""


@pytest.mark.parametrize("what", ["status", "queues", "why"])
def test_no_answer_holds_a_secret(what: str) -> None:
    wire = SealedConversation(SNAPSHOTS).join()
    wire.say(name(0), report(0, number=1))
    answer = encode(wire.say(STRANGER, Ask(what)).outgoing[0][1])
    secrets = [KEYS.key, KEYS.of_control, KEYS.of_link(0, 1), KEYS.of_place(0), *map(KEYS.of_incarnation, (1, 2))]
    for secret in secrets:
        assert secret not in answer
        assert secret.hex().encode() not in answer
        assert secret.hex() not in "\n".join(wire.core.run.events.infos)


def test_a_broker_that_is_started_again_knows_the_secrets_of_its_records() -> None:
    first = SealedConversation(SNAPSHOTS).join()
    again = SealedConversation(SNAPSHOTS, first.store, key=b"l" * 32)
    again.serial = first.serial
    assert again.say(name(0), hello(0, incarnation=1, endpoint="ipc://0"), KEYS.of_incarnation(1)).trusted


# A broker whose records are lost


def remembering(incarnation: int, index: int = 0, step: int = 0) -> Hello:
    memory = WorkerRecord("run-1", index, 0, step)
    return msgspec.structs.replace(
        hello(index, incarnation=incarnation, endpoint=f"ipc://{index}"), memory=memory, snapshots=[], token="a" * 32
    )


def test_a_broker_that_lost_its_records_believes_workers_that_remember_the_run() -> None:
    lost = SealedConversation(SNAPSHOTS, key=b"l" * 32, new=False)
    lost.say(name(0), remembering(7), KEYS.of_incarnation(7))
    assert lost.core.run.lifecycle.state is Life.RECONCILING


@pytest.mark.parametrize("new", [True, False])
def test_a_stranger_that_says_it_remembers_the_run_starts_nothing_once_the_run_has_begun(new: bool) -> None:
    wire = SealedConversation(SNAPSHOTS, new=new).join()
    wire.say(STRANGER, msgspec.structs.replace(remembering(2**53 - 1)), b"")
    assert wire.core.run.lifecycle.state is Life.RUNNING


def test_nor_at_a_broker_whose_run_is_new() -> None:
    wire = SealedConversation(SNAPSHOTS)
    wire.say(STRANGER, remembering(7), b"x" * 32)
    assert wire.core.run.lifecycle.state is Life.WAITING


def test_a_worker_at_an_incarnation_of_this_broker_must_prove_it_before_the_run_has_begun_too() -> None:
    wire = SealedConversation(SNAPSHOTS, new=False)
    wire.say(name(0), hello(0))
    before = wire.state()
    wire.say(STRANGER, remembering(1), b"")
    assert wire.state() == before


def test_a_worker_that_kept_its_state_learns_its_new_incarnation_though_the_first_answer_was_lost() -> None:
    lost = SealedConversation(SNAPSHOTS, key=b"l" * 32, new=False)
    for index in range(2):
        lost.say(name(index), remembering(7 + index, index), KEYS.of_incarnation(7 + index))
    lost.now += SNAPSHOTS.lease
    lost.core.tick(lost.now)
    assert lost.core.run.registry.begun
    for sender, token in ((STRANGER, ""), (name(0), "a" * 32)):
        asking = msgspec.structs.replace(remembering(7), token=token)
        answers = [message for _, message in lost.say(sender, asking, KEYS.of_incarnation(7)).outgoing]
        places = [message for message in answers if isinstance(message, Assigned)]
        assert len(places) == (sender != STRANGER)
    assert places[0].keep
    assert places[0].secret == lost.core.run.keys.of_incarnation(places[0].incarnation)
    assert lost.say(name(0), Report(places[0].incarnation, 1, "0F0 of step 0", 0.0, 0.0, number=1)).trusted
    lost.say(name(0), remembering(7), KEYS.of_incarnation(7))  # it has its secret: the former name is no name any more
    assert lost.core.run.events.anomalies["forged"] == 2


def test_refusals_of_a_flood_are_counted_and_a_few_are_logged() -> None:
    wire = SealedConversation().join()
    for _ in range(1000):
        wire.say(STRANGER, StopRun("enough"), b"")
    assert wire.core.run.events.anomalies["forged"] == 1000
    assert len(wire.core.run.events.warnings) == 20
    wire.core.tick(wire.now + 10.0)
    assert wire.core.run.events.warnings[20].startswith("forged: 980 more in the last ")
    wire.say(STRANGER, StopRun("enough"), b"")  # an attack on another day is named again
    assert wire.core.run.events.warnings[-1] == "refused: StopRun from an unknown peer without the run's secret"


def test_what_is_of_no_use_to_a_stranger_is_still_open_to_it() -> None:
    """A worker without a place has no secret yet."""
    wire = SealedConversation(SNAPSHOTS).join()
    spare = msgspec.structs.replace(hello(7), claim=None, spare=True)
    assert [type(message) for _, message in wire.say(b"spare", spare).outgoing] == [Standby]
    assert not any(isinstance(message, Peers) for _, message in wire.say(b"spare", spare).outgoing)


def test_a_broker_that_adopted_its_run_believes_no_stranger_when_the_run_is_resumed() -> None:
    """A run restarted as a whole has not begun again, and its broker took any Hello for that of a worker which knows
    more than the records."""
    first = SealedConversation(SNAPSHOTS, new=False).join()
    first.core.run.fail("enough", 1)
    run_of(first.store, PLAN, KEYS.run, KEYS.key, resume=True, alone=True)
    resumed = SealedConversation(SNAPSHOTS, first.store, new=False)
    assert resumed.core.run.adopted
    resumed.say(STRANGER, remembering(2**53 - 1), b"")
    assert resumed.core.run.lifecycle.state is Life.WAITING
    assert resumed.core.run.events.anomalies["forged"] == 1


# Strangers who are heard, and take too much


def spare(number: int) -> Hello:
    return msgspec.structs.replace(hello(number), claim=None, spare=True)


def test_a_stranger_that_asks_much_is_answered_once_in_a_turn_and_a_member_always() -> None:
    wire = SealedConversation().join()
    assert [len(wire.say(STRANGER, Ask("status")).outgoing) for _ in range(3)] == [1, 0, 0]
    assert [len(wire.say(b"command", Ask("status"), KEYS.of_control).outgoing) for _ in range(3)] == [1, 1, 1]
    wire.core.tick(wire.now)
    assert len(wire.say(STRANGER, Ask("status")).outgoing) == 1


def test_many_strangers_get_so_many_answers_in_a_turn() -> None:
    wire = SealedConversation().join()
    answers = [len(wire.say(b"stranger %d" % number, Ask("status")).outgoing) for number in range(2 * QUESTIONS)]
    assert sum(answers) == QUESTIONS
    assert wire.say(name(2), spare(2)).outgoing


def test_so_many_processes_stand_by_without_their_settings() -> None:
    wire = SealedConversation(SNAPSHOTS).join()
    many = msgspec.structs.replace(spare(2), settings={"schedule": {"name": "1f1b"}})
    for number in range(MOST + 10):
        wire.say(b"stranger %d" % number, msgspec.structs.replace(many, pid=number))
    assert len(wire.core.run.standby) == MOST + 2
    assert not any(contact.hello.settings for contact in wire.core.run.standby.values())


def test_a_stranger_that_names_itself_as_one_on_standby_does_not_take_its_turn() -> None:
    wire = SealedConversation(SNAPSHOTS).join()
    wire.say(b"spare", msgspec.structs.replace(spare(2), token="a" * 32))
    wire.say(STRANGER, msgspec.structs.replace(spare(2), token="b" * 32))
    assert [contact.sender for contact in wire.core.run.standby.values()] == [b"spare", STRANGER]


def test_a_long_message_is_not_decoded_before_it_is_proven() -> None:
    """A Hello of 0.9 MB with a million empty lists took a second and 60 MB, as often as a stranger wanted."""
    wire = SealedConversation(SNAPSHOTS).join()
    long = msgspec.structs.replace(spare(2), settings={"a": [[]] * LARGEST_UNPROVEN})
    with pytest.raises(BadMessage, match="proves nothing"):
        decode_to_broker(encode(long), wire.core.is_proven)
    proven = report(0, steps=steps(0, *range(1000)))
    for secret in (KEYS.of_incarnation(2), KEYS.of_control, b""):
        with pytest.raises(BadMessage, match="proves nothing"):
            decode_to_broker(encode(proven, secret, 99), wire.core.is_proven)
    sealed = decode_to_broker(encode(proven, KEYS.of_incarnation(1), 99), wire.core.is_proven)
    assert sealed.message == proven


def test_a_stranger_that_names_itself_as_a_running_worker_does_not_stand_for_it_when_records_are_lost() -> None:
    """A forged Hello took the place of the worker's own, and the worker lost its stages."""
    lost = SealedConversation(SNAPSHOTS, key=b"l" * 32, new=False)
    for index in range(2):
        lost.say(name(index), remembering(7 + index, index), KEYS.of_incarnation(7 + index))
    lost.say(STRANGER, msgspec.structs.replace(hello(0), snapshots=[]))
    lost.now += SNAPSHOTS.lease
    lost.core.tick(lost.now)
    assert sorted(lost.core.run.registry.members) == [0, 1]
