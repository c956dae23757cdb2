"""The gate lets each key say what it may, answers enrolments and orders itself, and answers only what is kept."""

from collections.abc import Callable
from typing import get_args

import msgspec
import pytest

from stageline.broker.control.channel import Received
from stageline.broker.control.leaves import LeaveWorker
from stageline.broker.control.messages import (
    CONTROL_VERSION,
    Answer,
    Ask,
    Declined,
    Exited,
    Hello,
    Refused,
    Report,
    StopRun,
    ToBroker,
)
from stageline.broker.control.pauses import PauseRun
from stageline.broker.control.protocol import RunKeys, decode_from_broker, decode_to_broker, encode, sealed
from stageline.broker.control.records import WorkerRecord
from stageline.broker.control.store import Fact, MemoryStore, StoreUnusable
from stageline.broker.coordinator import gate
from stageline.broker.coordinator.gate import ANSWERED, KEYS, KeyGate, OpenGate, Sorted
from stageline.broker.coordinator.rights import RIGHTS_FOR
from stageline.broker.coordinator.state import EventLog
from stageline.broker.keys.changes import KeyChange
from stageline.broker.keys.enrolment import Enrolment, encode_enrolment, read_answer
from stageline.broker.keys.pairs import KeyPair, PublicKey, invite_pair
from stageline.broker.keys.parties import Parties, Party
from stageline.broker.keys.register import Invitation, KeyRegister, Right

RUN = RunKeys("run-1", b"k" * 32)
NOW = 1_000_000.0


def key(number: int) -> PublicKey:
    return KeyPair.of_secret(bytes([number]) * 32).public


OPERATOR, WORKER, INVITED = key(1), key(2), invite_pair(bytes(16)).public
HELLO = Hello(CONTROL_VERSION, "d" * 64, "worker", "host", 1, "tcp://127.0.0.1:9")


class Gateway:
    """A gate, and what has become of what came over connections with keys."""

    def __init__(self, store: MemoryStore | None = None) -> None:
        self.register, self.store, self.events = KeyRegister(), store or MemoryStore(), EventLog()
        self.register.invite(Invitation(INVITED.text, ends=NOW + 60, name="lab"))
        self.gate = KeyGate(self.register, self.store, RUN, OPERATOR, lambda serial: key(100 + serial), self.events)

    def brings(self, *frames: tuple[PublicKey, bytes], now: float = NOW) -> Sorted:
        received: list[Received] = [(b"%d" % place, frame) for place, (_, frame) in enumerate(frames)]
        return self.gate.sort(received, lambda sender: frames[int(sender)][0].text, now)

    def says(self, key: PublicKey, message: ToBroker, *, now: float = NOW) -> Sorted:
        secret = RUN.of_control if isinstance(message, KeyChange) else b""
        return self.brings((key, encode(message, secret, 1)), now=now)

    def refusal(self, key: PublicKey, message: ToBroker) -> str:
        found = self.says(key, message)
        assert not found.passed
        (answer,) = found.answers
        refused = decode_from_broker(answer[1]).message
        assert isinstance(refused, Refused)
        return refused.reason

    def admit(self, key: PublicKey, *rights: Right, worker: int | None = None) -> None:
        self.register.admit(key, NOW, rights=rights, worker=worker)


@pytest.fixture
def entrance() -> Gateway:
    return Gateway()


def enrolment(key: PublicKey, name: str = "worker-0") -> bytes:
    return encode_enrolment(Enrolment(key.text, name, "desk"))


def test_every_message_to_the_broker_has_a_row_in_the_table_of_rights() -> None:
    tags = {str(each.__struct_config__.tag) for each in get_args(ToBroker)}
    assert tags <= set(RIGHTS_FOR)
    assert {name.partition(" ")[0] for name in RIGHTS_FOR} <= tags


def test_a_key_that_may_work_says_what_workers_say_and_no_more(entrance: Gateway) -> None:
    entrance.admit(WORKER)
    for message in (
        HELLO,
        Report(1, 2, "1F0", 0.0, 0.0),
        Declined("desk", 1, "no model"),
        Ask("join"),
        Ask("status"),
    ):
        assert len(entrance.says(WORKER, message).passed) == 1
    inspects = [(Ask(what), "inspect") for what in ("queues", "queue", "peek", "export")]
    for message, right in ((Ask("why"), "look"), (StopRun("enough"), "stop"), *inspects):
        said = entrance.refusal(WORKER, message)
        assert f"no right to {right}" in said
        assert WORKER.text[:11] in said
        assert f"`stageline keys admit {WORKER.text} --right work --right {right}`" in said


def test_what_a_supervisor_and_the_operator_say_is_not_for_other_keys(entrance: Gateway) -> None:
    entrance.admit(WORKER, *Right)
    for message in (Exited(0, 1, 1), KeyChange("admit", key(3).text)):
        assert "the broker's own user" in entrance.refusal(WORKER, message)
    assert entrance.says(OPERATOR, Exited(0, 1, 1)).passed
    assert not entrance.register.enrolled(key(3).text)


def test_a_right_that_is_given_lets_the_message_pass(entrance: Gateway) -> None:
    entrance.admit(WORKER, Right.LOOK)
    assert entrance.says(WORKER, Ask("why")).passed
    assert "no right to work" in entrance.refusal(WORKER, HELLO)


def test_a_request_to_stop_by_its_right_is_sealed_for_the_coordinator_and_logged_with_its_key(
    entrance: Gateway,
) -> None:
    """The right to stop was of no use: the coordinator demands the run's secret, which stays on its machine."""
    entrance.register.admit(WORKER, NOW, name="lab", rights=(Right.STOP,))
    serials = []
    for _ in range(2):
        found = entrance.says(WORKER, StopRun("enough", at_step_end=True))
        ((_, frame),) = found.passed
        message, seal = decode_to_broker(frame or b"")
        assert message == StopRun("enough (lab)", at_step_end=True)
        assert seal.is_of(RUN.of_control)
        serials.append(seal.serial)
    assert serials[0] < serials[1]
    assert [(each.what, each.key, each.detail) for each in entrance.says(OPERATOR, StopRun("enough")).events] == [
        ("stopped", OPERATOR.text, "enough")
    ]
    ((_, over),) = entrance.says(WORKER, StopRun("over", over=True)).passed  # its supervisor alone dismisses a broker
    assert not decode_to_broker(over or b"")[1].is_of(RUN.of_control)
    waiting = entrance.gate.passed([(b"0", encode(StopRun("enough"), b"", 1))], lambda sender: WORKER.text)
    assert decode_to_broker(waiting[0][1] or b"")[1].is_of(RUN.of_control)


def test_a_pause_needs_the_right_to_stop_and_is_sealed_in_the_name_of_its_key(entrance: Gateway) -> None:
    entrance.admit(WORKER)
    assert "no right to stop" in entrance.refusal(WORKER, PauseRun("root@desk"))
    entrance.register.admit(WORKER, NOW, name="lab", rights=(Right.STOP,))
    told = []
    for request in (PauseRun("root@desk", "a backup"), PauseRun("root@desk", resumes=True)) * 2:
        found = entrance.says(WORKER, request)
        message, seal = decode_to_broker(found.passed[0][1] or b"")
        assert message == PauseRun("lab", request.reason, request.resumes)
        assert seal.is_of(RUN.of_control)
        told += [(each.what, each.name, each.detail) for each in found.events]
    assert told == [("paused", "lab", "a backup"), ("resumed", "lab", "")] * 2


def test_a_leave_needs_the_right_to_stop_and_is_asked_in_the_name_of_its_key(entrance: Gateway) -> None:
    asked = LeaveWorker("root@desk", 1, 60.0, "the machine is needed")
    entrance.admit(WORKER)
    assert "no right to stop" in entrance.refusal(WORKER, asked)
    entrance.register.admit(WORKER, NOW, name="lab", rights=(Right.STOP,))
    found = entrance.says(WORKER, asked)
    message, seal = decode_to_broker(found.passed[0][1] or b"")
    assert message == LeaveWorker("lab", 1, 60.0, "the machine is needed")
    assert seal.is_of(RUN.of_control)
    assert [(each.what, each.name) for each in found.events] == [("drained", "lab")]


def test_an_invitations_key_enrols_a_key_and_says_nothing_else(entrance: Gateway) -> None:
    for message in (HELLO, Ask("status"), StopRun("enough"), KeyChange("admit", key(3).text)):
        assert "invitation" in entrance.refusal(INVITED, message)
    found = entrance.brings((INVITED, enrolment(WORKER)))
    assert read_answer(found.answers[0][1]).refusal == ""
    assert [(each.what, each.key, each.host) for each in found.events] == [("enrolled", WORKER.text, "desk")]
    assert entrance.says(WORKER, HELLO).passed


def test_an_enrolment_that_is_repeated_is_answered_again_and_logged_once(entrance: Gateway) -> None:
    entrance.brings((INVITED, enrolment(WORKER)))
    again = entrance.brings((INVITED, enrolment(WORKER)))
    assert read_answer(again.answers[0][1]).refusal == ""
    assert again.events == []


def test_a_key_names_its_successor_once_and_the_log_names_both(entrance: Gateway) -> None:
    entrance.admit(WORKER, Right.LOOK, worker=1)
    found = entrance.brings((WORKER, enrolment(key(3))), (WORKER, enrolment(key(3))))
    assert [read_answer(frame).refusal for _, frame in found.answers] == ["", ""]
    assert [(each.what, each.key, each.detail) for each in found.events] == [
        ("succeeded", key(3).text, f"in the place of {WORKER.text}")
    ]
    assert entrance.store.load().facts[KEYS]["keys"][-1]["rights"] == ["look"]
    assert entrance.says(key(3), Ask("why")).passed
    again = entrance.brings((WORKER, enrolment(key(4))))
    assert "rotated before" in read_answer(again.answers[0][1]).refusal
    assert [each.what for each in again.events] == ["refused"]
    entrance.register.revoke(WORKER.text, NOW)
    assert not entrance.brings((WORKER, enrolment(key(5)))).passed
    assert not entrance.register.enrolled(key(5).text)


def test_an_invitation_that_ended_while_it_was_connected_says_so(entrance: Gateway) -> None:
    found = entrance.brings((INVITED, enrolment(WORKER)), now=NOW + 61)
    assert "ended" in read_answer(found.answers[0][1]).refusal
    assert "ended" in read_answer(entrance.brings((INVITED, enrolment(WORKER))).answers[0][1]).refusal
    assert [each.what for each in found.events] == ["refused"]


def test_a_key_that_was_revoked_is_refused_over_the_connection_that_it_has(entrance: Gateway) -> None:
    entrance.admit(WORKER)
    assert entrance.says(WORKER, HELLO).passed
    found = entrance.says(OPERATOR, KeyChange("revoke", WORKER.text))
    assert found.readmit
    assert [each.what for each in found.events] == ["revoked"]
    said = entrance.refusal(WORKER, Report(1, 2, "1F0", 0.0, 0.0))
    assert "was revoked" in said
    assert f"`stageline keys admit {WORKER.text}`" in said


def test_of_many_who_have_spoken_those_who_speak_again_lose_their_places_with_their_key(
    entrance: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker that had reported all along was forgotten first: it had been the first to come."""
    monkeypatch.setattr(gate, "MOST_SPEAKERS", 2)
    entrance.admit(WORKER)
    entrance.admit(key(3), Right.LOOK)
    for sender, speaker in ((b"w", WORKER), (b"1", key(3)), (b"w", WORKER), (b"2", key(3))):
        message = HELLO if speaker == WORKER else Ask("status")
        assert entrance.gate.sort([(sender, encode(message))], {sender: speaker.text}.__getitem__, NOW).passed
    assert entrance.says(OPERATOR, KeyChange("revoke", WORKER.text)).revoked == {b"w"}


def test_a_key_that_is_bound_to_a_place_asks_for_that_place_alone(entrance: Gateway) -> None:
    entrance.admit(WORKER, worker=1)
    assert "worker 1 alone, and asks for any place: start it with --index 1" in entrance.refusal(WORKER, HELLO)
    other = Hello(*(getattr(HELLO, name) for name in HELLO.__struct_fields__[:6]), claim=0)
    assert "place 0" in entrance.refusal(WORKER, other)
    mine = Hello(*(getattr(HELLO, name) for name in HELLO.__struct_fields__[:6]), claim=1)
    known = Hello(*(getattr(HELLO, name) for name in HELLO.__struct_fields__[:6]), incarnation=7)
    assert entrance.says(WORKER, mine).passed
    assert entrance.says(WORKER, known).passed


PARTIES = (Party("hospital", (key(5).text,), (0,)), Party("lab", (WORKER.text,), (1,)))


@pytest.mark.parametrize("incarnation", [0, 7])
@pytest.mark.parametrize("parties", [(), PARTIES], ids=["bound", "party"])
def test_a_key_does_not_get_a_place_that_is_not_its_own_by_what_its_process_remembers(
    parties: Parties, incarnation: int, entrance: Gateway
) -> None:
    """A broker that has lost its records gives places by memory, and the gate looked at the claim alone."""
    entrance.register.list_parties(parties, NOW)
    if not parties:
        entrance.admit(WORKER, worker=1)
    mine = msgspec.structs.replace(
        HELLO, claim=1, incarnation=incarnation, key=WORKER.text, memory=WorkerRecord("run-1", 1, 0, 0)
    )
    assert entrance.says(WORKER, mine).passed
    other = msgspec.structs.replace(mine, memory=WorkerRecord("run-1", 0, 0, 0))
    assert "asks for place 0" in entrance.refusal(WORKER, other)
    assert entrance.says(WORKER, Report(1, 2, "1F0", 0.0, 0.0, memory=2**30)).passed  # bytes, by the same name


def test_orders_are_carried_out_and_answered_with_what_they_have_changed(entrance: Gateway) -> None:
    found = entrance.says(OPERATOR, KeyChange("invite", name="lab", worker=1, rights=(Right.LOOK,), seconds=60.0))
    answer = decode_from_broker(found.answers[0][1]).message
    assert isinstance(answer, Answer)
    assert answer.schema == "keys/1"
    assert answer.facts["changed"] == {
        "key": key(101).text,
        "ends": NOW + 60,
        "once": False,
        "name": "lab",
        "worker": 1,
        "serial": 1,
        "rights": ["look"],
    }
    entrance.brings((key(101), enrolment(WORKER)))
    enrolled = entrance.register.enrolled(WORKER.text)
    assert enrolled is not None
    assert (enrolled.worker, enrolled.rights) == (1, (Right.LOOK,))
    entrance.says(OPERATOR, KeyChange("admit", key(3).text, name="spare"))
    assert entrance.says(key(3), HELLO).passed


def test_the_standing_line_ends_with_a_key_that_came_by_it_and_another_takes_its_place(entrance: Gateway) -> None:
    other = Invitation(key(9).text, ends=None, serial=0)
    entrance.register.invite(other)
    entrance.register.drop(lambda each: each.key == INVITED.text)
    entrance.brings((key(9), enrolment(WORKER)))
    found = entrance.says(OPERATOR, KeyChange("revoke", WORKER.text))
    answer = decode_from_broker(found.answers[0][1]).message
    assert isinstance(answer, Answer)
    assert answer.facts["revoked_with"] == [other.key]
    assert [(each.what, each.key, each.detail) for each in found.events] == [
        ("revoked", WORKER.text, ""),
        ("revoked", other.key, f"with {WORKER.text}"),
    ]
    assert not entrance.register.admits(key(9))
    (standing,) = entrance.register.record.invitations
    assert (standing.key, standing.ends) == (key(101).text, None)
    entrance.says(OPERATOR, KeyChange("revoke", standing.key))  # by itself: there is none then
    assert entrance.register.record.invitations == ()


def test_an_order_revokes_successors_and_closes_their_connections(entrance: Gateway) -> None:
    entrance.admit(WORKER, Right.WORK)
    entrance.brings((WORKER, enrolment(key(3))))
    assert entrance.says(key(3), HELLO).passed
    found = entrance.says(OPERATOR, KeyChange("revoke", WORKER.text, successors=True))
    assert [(each.what, each.key) for each in found.events] == [("revoked", WORKER.text), ("revoked", key(3).text)]
    assert found.revoked
    assert not entrance.register.admits(key(3))


def test_an_order_about_no_key_and_one_without_the_runs_secret_are_refused(entrance: Gateway) -> None:
    assert "`stageline keys ls`" in entrance.refusal(OPERATOR, KeyChange("revoke", key(3).text))
    assert "is not a public key" in entrance.refusal(OPERATOR, KeyChange("admit", "k2.x"))
    found = entrance.brings((OPERATOR, encode(KeyChange("admit", key(3).text))))
    assert "without the run's secret" in str(decode_from_broker(found.answers[0][1]).message)
    assert not entrance.register.enrolled(key(3).text)


def test_the_secret_of_a_revoked_invitation_is_not_used_again_by_a_successor(entrance: Gateway) -> None:
    assert entrance.register.record.standing == 0
    entrance.says(OPERATOR, KeyChange("revoke", INVITED.text))
    assert entrance.register.record.standing == 1
    answer = decode_from_broker(entrance.says(OPERATOR, KeyChange("invite")).answers[0][1]).message
    assert isinstance(answer, Answer)
    assert answer.facts["changed"]["serial"] == 2  # type: ignore[index]


class FullStore(MemoryStore):
    def put(self, name: str, fact: Fact) -> None:
        raise StoreUnusable("the disk is full")


@pytest.mark.parametrize(
    "frame",
    [(INVITED, enrolment(WORKER)), (OPERATOR, encode(KeyChange("admit", key(3).text), RUN.of_control, 1))],
    ids=["enrolment", "order"],
)
def test_what_is_not_stored_is_not_answered(frame: tuple[PublicKey, bytes]) -> None:
    with pytest.raises(StoreUnusable):
        Gateway(FullStore()).brings(frame)


def test_the_record_is_stored_once_for_a_turn_before_its_answers(entrance: Gateway) -> None:
    found = entrance.brings(*((INVITED, enrolment(key(number))) for number in range(2, 9)))
    assert len(found.answers) == 7
    stored = entrance.store.load().facts[KEYS]
    assert len(stored["keys"]) == 7  # type: ignore[arg-type]


def test_while_the_store_waits_messages_pass_by_their_keys_and_nothing_is_changed(entrance: Gateway) -> None:
    entrance.admit(WORKER)
    frames = [(WORKER, encode(HELLO)), (INVITED, enrolment(key(3))), (WORKER, encode(Ask("why")))]
    received: list[Received] = [(b"%d" % place, frame) for place, (_, frame) in enumerate(frames)]
    assert entrance.gate.passed(received, lambda sender: frames[int(sender)][0].text) == received[:1]
    assert entrance.register.enrolled(key(3).text) is None


def test_a_stop_while_the_store_waits_is_logged_once_it_does_not(entrance: Gateway) -> None:
    """It was noted as told, and its line was thrown away."""
    entrance.register.admit(WORKER, NOW, name="lab", rights=(Right.STOP,))
    stop = StopRun("enough")
    for _ in range(2):
        assert entrance.gate.passed([(b"0", encode(stop))], lambda sender: WORKER.text)
    told = [(each.what, each.key, each.name, each.detail) for each in entrance.brings().events]
    assert told == [("stopped", WORKER.text, "lab", "enough")]
    assert entrance.says(WORKER, stop).events == []


class WaitingStore(MemoryStore):
    """A store that waits before it puts."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: list[Callable[[], object]] = []

    def put(self, name: str, fact: Fact) -> None:
        while self.waits:
            self.waits.pop()()
        super().put(name, fact)


def test_a_stop_while_the_keys_themselves_wait_to_be_stored_is_logged() -> None:
    entrance = Gateway(store := WaitingStore())
    entrance.admit(WORKER, Right.STOP)
    frames = [(b"0", encode(StopRun("enough")))]
    store.waits.append(lambda: entrance.gate.passed(frames, lambda sender: WORKER.text))
    assert [each.what for each in entrance.brings().events] == ["stopped"]


def test_refusals_are_counted_logged_once_and_answered_within_bounds(entrance: Gateway) -> None:
    entrance.admit(WORKER)
    found = entrance.brings(*(5 * ANSWERED * [(WORKER, encode(Ask("why")))]))
    assert len(found.answers) == ANSWERED
    assert entrance.events.anomalies["refused by key"] == 5 * ANSWERED
    assert len(found.events) == 1
    assert entrance.says(WORKER, Ask("why"), now=NOW + 2).events == []


def strange(number: int) -> bytes:
    """A message of no kind, with a long name."""
    return sealed(msgspec.msgpack.encode({"is": f"{number}" + 60_000 * "\x01"}))


def unknown(number: int) -> bytes:
    """A message of no kind, with a name of its own."""
    return sealed(msgspec.msgpack.encode({"is": f"strange {number}"}))


@pytest.mark.parametrize("frame", [strange, unknown])
def test_what_a_key_makes_up_neither_flushes_the_log_nor_fills_the_memory(
    frame: Callable[[int], bytes], entrance: Gateway
) -> None:
    """The kind of a message was told in full, and every kind was a line: 1,000 of 64 KiB were remembered."""
    entrance.admit(WORKER)
    found = entrance.brings(*((WORKER, frame(number)) for number in range(5 * ANSWERED)))
    assert not found.passed
    assert 1 <= len(found.events) <= ANSWERED
    assert max(len(each.detail) for each in found.events) < 1_000
    assert max(map(len, entrance.events.warnings)) < 1_000
    assert [each.what for each in entrance.says(WORKER, Ask("why"), now=NOW + 2).events] == ["refused"]


def test_a_question_of_a_long_kind_is_no_message(entrance: Gateway) -> None:
    entrance.admit(WORKER)
    assert "not a control message" in entrance.refusal(WORKER, Ask(1_000 * "why"))


def test_a_long_reason_of_a_stop_is_cut_in_the_log(entrance: Gateway) -> None:
    entrance.admit(WORKER, Right.STOP)
    (event,) = entrance.says(WORKER, StopRun(50_000 * "!")).events
    assert event.what == "stopped"
    assert len(event.detail) < 3_000


def test_an_invitation_that_was_used_up_does_not_flush_the_log(entrance: Gateway) -> None:
    once = key(9)
    entrance.register.invite(Invitation(once.text, ends=NOW + 60, once=True))
    entrance.brings((once, enrolment(key(3))))
    strange = (Enrolment(f"k1.{number}" + 150 * "x", 200 * "a", 200 * "b") for number in range(5 * ANSWERED))
    found = entrance.brings(*((once, encode_enrolment(each)) for each in strange))
    assert len(found.answers) == 5 * ANSWERED
    assert {each.what for each in found.events} == {"refused"}
    assert len(found.events) <= ANSWERED


def test_a_key_that_knocks_is_told_once_with_the_command_that_admits_it(entrance: Gateway) -> None:
    for _ in range(3):
        assert not entrance.register.admits(key(3))
    assert [(each.what, each.key) for each in entrance.brings().events] == [("refused", key(3).text)]
    assert f"`stageline keys admit {key(3).text}`" in entrance.events.warnings[-1]
    entrance.register.admits(key(3))
    assert entrance.brings(now=NOW + 2).events == []


def test_of_many_strangers_few_are_told(entrance: Gateway) -> None:
    for number in range(30, 60):
        entrance.register.admits(key(number))
    assert len(entrance.brings().events) == 1


def test_what_is_no_message_does_not_come_to_the_coordinator(entrance: Gateway) -> None:
    entrance.admit(WORKER)
    found = entrance.brings((WORKER, b"garbage"))
    assert not found.passed
    assert "the same stageline" in str(decode_from_broker(found.answers[0][1]).message)


def test_everything_passes_the_gate_of_a_broker_without_keys() -> None:
    received: list[Received] = [(b"a", b"anything"), (b"b", None)]
    assert OpenGate().sort(received, lambda sender: "", NOW).passed == received
