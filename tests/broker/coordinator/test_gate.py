"""The gate lets each key say what it may, answers enrolments and orders itself, and answers only what is kept."""

from typing import get_args

import pytest

from stageline.broker.control.channel import Received
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
from stageline.broker.control.protocol import RunKeys, decode_from_broker, encode
from stageline.broker.control.store import Fact, MemoryStore, StoreUnusable
from stageline.broker.coordinator import gate
from stageline.broker.coordinator.gate import ANSWERED, KEYS, KeyGate, OpenGate, Sorted
from stageline.broker.coordinator.rights import RIGHTS_FOR
from stageline.broker.coordinator.state import EventLog
from stageline.broker.keys.enrolment import Enrolment, encode_enrolment, read_answer
from stageline.broker.keys.orders import KeyOrder
from stageline.broker.keys.pairs import KeyPair, PublicKey, invite_pair
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
        secret = RUN.of_control if isinstance(message, KeyOrder) else b""
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
    for message, right in ((Ask("why"), "look"), (StopRun("enough"), "stop"), (Ask("queues"), "inspect")):
        said = entrance.refusal(WORKER, message)
        assert f"no right to {right}" in said
        assert WORKER.text[:11] in said
        assert f"`stageline keys admit {WORKER.text} --right work --right {right}`" in said


def test_what_a_supervisor_and_the_operator_say_is_not_for_other_keys(entrance: Gateway) -> None:
    entrance.admit(WORKER, *Right)
    for message in (Exited(0, 1, 1), KeyOrder("admit", key(3).text)):
        assert "the broker's own user" in entrance.refusal(WORKER, message)
    assert entrance.says(OPERATOR, Exited(0, 1, 1)).passed
    assert not entrance.register.enrolled(key(3).text)


def test_a_right_that_is_given_lets_the_message_pass(entrance: Gateway) -> None:
    entrance.admit(WORKER, Right.LOOK)
    assert entrance.says(WORKER, Ask("why")).passed
    assert "no right to work" in entrance.refusal(WORKER, HELLO)


def test_an_invitations_key_enrols_a_key_and_says_nothing_else(entrance: Gateway) -> None:
    for message in (HELLO, Ask("status"), StopRun("enough"), KeyOrder("admit", key(3).text)):
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


def test_an_invitation_that_ended_while_it_was_connected_says_so(entrance: Gateway) -> None:
    found = entrance.brings((INVITED, enrolment(WORKER)), now=NOW + 61)
    assert "ended" in read_answer(found.answers[0][1]).refusal
    assert "ended" in read_answer(entrance.brings((INVITED, enrolment(WORKER))).answers[0][1]).refusal
    assert [each.what for each in found.events] == ["refused"]


def test_a_key_that_was_revoked_is_refused_over_the_connection_that_it_has(entrance: Gateway) -> None:
    entrance.admit(WORKER)
    assert entrance.says(WORKER, HELLO).passed
    found = entrance.says(OPERATOR, KeyOrder("revoke", WORKER.text))
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
    assert entrance.says(OPERATOR, KeyOrder("revoke", WORKER.text)).revoked == {b"w"}


def test_a_key_that_is_bound_to_a_place_asks_for_that_place_alone(entrance: Gateway) -> None:
    entrance.admit(WORKER, worker=1)
    assert "worker 1 alone, and asks for any place: start it with --index 1" in entrance.refusal(WORKER, HELLO)
    other = Hello(*(getattr(HELLO, name) for name in HELLO.__struct_fields__[:6]), claim=0)
    assert "place 0" in entrance.refusal(WORKER, other)
    mine = Hello(*(getattr(HELLO, name) for name in HELLO.__struct_fields__[:6]), claim=1)
    known = Hello(*(getattr(HELLO, name) for name in HELLO.__struct_fields__[:6]), incarnation=7)
    assert entrance.says(WORKER, mine).passed
    assert entrance.says(WORKER, known).passed


def test_orders_are_carried_out_and_answered_with_what_they_have_changed(entrance: Gateway) -> None:
    found = entrance.says(OPERATOR, KeyOrder("invite", name="lab", worker=1, rights=(Right.LOOK,), seconds=60.0))
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
    entrance.says(OPERATOR, KeyOrder("admit", key(3).text, name="spare"))
    assert entrance.says(key(3), HELLO).passed


def test_an_order_about_no_key_and_one_without_the_runs_secret_are_refused(entrance: Gateway) -> None:
    assert "`stageline keys ls`" in entrance.refusal(OPERATOR, KeyOrder("revoke", key(3).text))
    assert "is not a public key" in entrance.refusal(OPERATOR, KeyOrder("admit", "k2.x"))
    found = entrance.brings((OPERATOR, encode(KeyOrder("admit", key(3).text))))
    assert "without the run's secret" in str(decode_from_broker(found.answers[0][1]).message)
    assert not entrance.register.enrolled(key(3).text)


def test_the_secret_of_a_revoked_invitation_is_not_used_again_by_a_successor(entrance: Gateway) -> None:
    assert entrance.register.record.standing == 0
    entrance.says(OPERATOR, KeyOrder("revoke", INVITED.text))
    assert entrance.register.record.standing == 1
    answer = decode_from_broker(entrance.says(OPERATOR, KeyOrder("invite")).answers[0][1]).message
    assert isinstance(answer, Answer)
    assert answer.facts["changed"]["serial"] == 2  # type: ignore[index]


class FullStore(MemoryStore):
    def put(self, name: str, fact: Fact) -> None:
        raise StoreUnusable("the disk is full")


@pytest.mark.parametrize(
    "frame",
    [(INVITED, enrolment(WORKER)), (OPERATOR, encode(KeyOrder("admit", key(3).text), RUN.of_control, 1))],
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


def test_refusals_are_counted_logged_once_and_answered_within_bounds(entrance: Gateway) -> None:
    entrance.admit(WORKER)
    found = entrance.brings(*(5 * ANSWERED * [(WORKER, encode(Ask("why")))]))
    assert len(found.answers) == ANSWERED
    assert entrance.events.anomalies["refused by key"] == 5 * ANSWERED
    assert len(found.events) == 1
    assert entrance.says(WORKER, Ask("why"), now=NOW + 2).events == []


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
