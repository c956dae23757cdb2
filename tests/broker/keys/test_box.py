"""Boxes: only the right keys open a message, once, in its session, its direction and under its name."""

import os
from dataclasses import dataclass, field

import pytest

from stageline.broker.keys import box
from stageline.broker.keys.admission import KeyRefusal
from stageline.broker.keys.box import BrokerBox, ClientBox, Unboxed
from stageline.broker.keys.pairs import KeyPair, PublicKey
from support.keyed import BROKER, STRANGER, WORKER, Admitted

PLACE = b"a place to answer"


def client(pair: KeyPair = WORKER, broker: KeyPair = BROKER, name: str = "run") -> ClientBox:
    return ClientBox(pair, broker.public, name, os.urandom)


def broker(*admitted: KeyPair, pair: KeyPair = BROKER, name: str = "run") -> BrokerBox:
    return BrokerBox(pair, Admitted([*admitted] or [WORKER]), name, os.urandom)


def unboxed(end: BrokerBox, frame: bytes) -> Unboxed:
    found = end.open(PLACE, frame)
    assert found is not None
    return found


def joined(there: BrokerBox, here: ClientBox | None = None) -> tuple[ClientBox, bytes]:
    """A client in a session, and the name of the session."""
    here = here or client()
    assert here.open(unboxed(there, here.opening).answer) is None
    assert here.is_open
    return here, unboxed(there, here.seal(b"hello")).sender


def answer(there: BrokerBox, sender: bytes, message: bytes) -> bytes:
    found = there.seal(sender, message)
    assert found is not None
    assert found[0] == PLACE
    return found[1]


def test_messages_pass_both_ways_and_their_key_is_known() -> None:
    there = broker()
    here, sender = joined(there)
    assert there.key_of(sender) == WORKER.public.text
    for message in (b"", b"step 3", bytes(100_000)):
        assert unboxed(there, here.seal(message)) == Unboxed(sender, message)
        assert here.open(answer(there, sender, message)) == message
    assert here.unopened == 0


def test_nothing_readable_is_in_a_frame_and_no_two_are_alike() -> None:
    there = broker()
    here, sender = joined(there)
    frames = [here.seal(b"digits on host desk") for _ in range(2)]
    frames += [answer(there, sender, b"digits on host desk") for _ in range(2)]
    assert len({frame[29:] for frame in frames}) == 4
    assert WORKER.public.raw not in here.opening + client().opening
    assert all(b"desk" not in frame and len(frame) == len(b"digits on host desk") + box.SURPLUS for frame in frames)


def test_every_byte_of_a_frame_is_proven_and_so_is_its_length() -> None:
    there = broker()
    here, sender = joined(there)
    to_broker, to_client = here.seal(b"stop"), answer(there, sender, b"stop")
    for place in range(len(to_broker)):
        for spoilt in (flipped(to_broker, place), to_broker[:place]):
            found = there.open(PLACE, spoilt)
            assert found is None or not found.sender
    for place in range(len(to_client)):
        assert here.open(flipped(to_client, place)) is here.open(to_client[:place]) is None
    assert there.open(PLACE, to_broker + b"\0") is here.open(to_client + b"\0") is None
    assert unboxed(there, to_broker).message == here.open(to_client) == b"stop"
    for place in range(len(here.opening)):
        assert there.open(PLACE, flipped(here.opening, place)) is None


def flipped(frame: bytes, place: int) -> bytes:
    return frame[:place] + bytes([frame[place] ^ 1]) + frame[place + 1 :]


def test_a_message_opens_once_and_no_older_one_after_it() -> None:
    there = broker()
    here, sender = joined(there)
    first, second = here.seal(b"1"), here.seal(b"2")
    assert unboxed(there, second).message == b"2"
    assert there.open(PLACE, second) is there.open(PLACE, first) is None
    first, second = answer(there, sender, b"1"), answer(there, sender, b"2")
    assert here.open(second) == b"2"
    assert here.open(second) is here.open(first) is None
    assert here.unopened == 2


def test_a_message_is_not_one_of_its_receiver() -> None:
    there = broker()
    here, sender = joined(there)
    assert here.open(here.seal(b"stop")) is None
    assert there.open(PLACE, answer(there, sender, b"stop")) is None
    assert here.open(here.opening) is None


def test_a_recorded_session_opens_nothing_at_a_broker_of_the_same_key_that_was_started_again() -> None:
    there, here = broker(), client()
    recorded = [here.opening]
    welcome = unboxed(there, here.opening).answer
    here.open(welcome)
    recorded += [here.seal(b"hello"), here.seal(b"stop")]
    again = broker()
    found = [again.open(PLACE, frame) for frame in recorded]
    lost = Unboxed(answer=b"SLBX\x04" + recorded[0][5:21])
    assert found[1:] == [lost, lost]
    other = client()
    assert other.open(welcome) is other.open(unboxed(again, recorded[0]).answer) is None
    assert not other.is_open


def test_who_has_recorded_a_session_and_gets_the_lasting_secrets_later_reads_nothing_of_it() -> None:
    """Both sides forget what they have drawn for it."""
    there = broker()
    here, sender = joined(there)
    recorded = here.opening, here.seal(b"step 3"), answer(there, sender, b"stop")
    thief_there, thief_here = broker(), client()
    thief_here.open(unboxed(thief_there, thief_here.opening).answer)
    found = [thief_there.open(PLACE, frame) for frame in recorded[1:]]
    assert not any(each is not None and each.message for each in found)
    assert thief_here.open(recorded[2]) is None


def test_who_has_a_clients_secret_cannot_speak_to_it_as_the_broker() -> None:
    """It can make what the two lasting keys agree on, and not what the client has drawn."""
    here = client()
    thief = broker(pair=KeyPair(BROKER.public, WORKER.secret))
    assert thief.open(PLACE, here.opening) is None


def test_an_opening_that_is_repeated_is_answered_and_its_session_goes_on() -> None:
    there, here = broker(), client()
    opening = here.opening
    _, sender = joined(there, here)
    assert unboxed(there, opening).answer
    assert unboxed(there, here.seal(b"on")) == Unboxed(sender, b"on")


@pytest.mark.parametrize(
    "other",
    [
        broker(name="another run"),
        broker(pair=STRANGER),
    ],
    ids=["name", "key"],
)
def test_a_broker_of_another_run_or_key_opens_nothing(other: BrokerBox) -> None:
    here, _ = joined(broker())
    assert other.open(PLACE, client().opening) is None
    found = other.open(PLACE, here.seal(b"stop"))
    assert found is not None
    assert not found.message


def test_one_who_is_admitted_cannot_speak_in_the_session_of_another() -> None:
    there = broker(WORKER, STRANGER)
    victim, _ = joined(there)
    thief, _ = joined(there, client(STRANGER))
    nonce, forged = victim.seal(b"")[5:21], thief.seal(b"stop")
    assert there.open(PLACE, forged[:5] + nonce + forged[21:]) is None
    assert there.open(PLACE, client(STRANGER).opening[:5] + nonce + client(STRANGER).opening[21:]) is None


@dataclass
class Unwelcoming:
    """An admission that admits no key, and notes each."""

    asked: list[PublicKey] = field(default_factory=list)

    def admits(self, public: PublicKey) -> bool:
        self.asked.append(public)
        return False

    def has_revoked(self, public: PublicKey) -> bool:
        return public == STRANGER.public


def test_a_key_that_is_not_admitted_is_noted_once_it_is_proven_and_told_so() -> None:
    noted = Unwelcoming()
    there, here = BrokerBox(BROKER, noted, "run", os.urandom), client()
    borrowed = client(KeyPair(STRANGER.public, WORKER.secret)).opening  # another's key, without its secret
    assert there.open(PLACE, borrowed) is None
    assert noted.asked == []
    refused = unboxed(there, here.opening).answer
    assert noted.asked == [WORKER.public]
    assert here.open(refused) is None
    assert here.refusal is KeyRefusal.NOT_ADMITTED
    assert not here.is_open
    assert here.opening == b""


def test_a_key_that_was_revoked_is_told_so() -> None:
    here = client(STRANGER)
    assert here.open(unboxed(BrokerBox(BROKER, Unwelcoming(), "run", os.urandom), here.opening).answer) is None
    assert here.refusal is KeyRefusal.REVOKED


def test_nobody_else_can_say_that_a_key_is_not_admitted() -> None:
    here, forger = client(), broker(STRANGER, pair=KeyPair.generate())
    own = client(broker=KeyPair.generate())
    refused = BrokerBox(BROKER, Unwelcoming(), "run", os.urandom).open(PLACE, client(STRANGER).opening)
    assert refused is not None
    old = client()
    recorded = unboxed(BrokerBox(BROKER, Unwelcoming(), "run", os.urandom), old.opening).answer
    for frame in (refused.answer, recorded, recorded[:5] + here.opening[5:21] + recorded[21:], own.opening):
        assert here.open(frame) is None
        assert not here.refusal
    assert forger.open(PLACE, here.opening) is None


def test_a_session_that_the_broker_has_lost_is_opened_again_and_serves_until_then() -> None:
    there = broker()
    here, sender = joined(there)
    there.forget()
    assert there.seal(sender, b"gone") is None
    assert there.key_of(sender) == ""
    lost = unboxed(there, here.seal(b"unheard")).answer
    assert here.open(lost) is None
    assert here.is_open
    opening = here.opening
    assert here.open(lost) is None
    assert here.opening == opening
    assert here.open(unboxed(there, opening).answer) is None
    assert unboxed(there, here.seal(b"again")).message == b"again"


def test_a_second_copy_of_an_opening_after_its_session_was_lost_does_not_hold_up_the_client() -> None:
    """The broker had a session with the same nonce and other keys: nothing opened, and nothing was said to be lost."""
    there, here = broker(), client()
    opening = here.opening
    assert here.open(unboxed(there, opening).answer) is None
    there.forget()
    assert here.open(unboxed(there, opening).answer) is None
    assert here.open(unboxed(there, here.seal(b"unheard")).answer) is None
    assert here.open(unboxed(there, here.opening).answer) is None
    assert unboxed(there, here.seal(b"again")).message == b"again"


def test_a_forged_loss_costs_an_opening_and_no_message() -> None:
    there = broker()
    here, sender = joined(there)
    assert here.open(here.seal(b"")[:4] + b"\x04" + sender) is None
    assert unboxed(there, here.seal(b"on")).message == b"on"
    assert here.open(answer(there, sender, b"on")) == b"on"


def test_of_too_many_sessions_the_one_that_was_silent_longest_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(box, "MOST_SESSIONS", 2)
    there = broker()
    first, _ = joined(there)
    second, lost = joined(there)
    assert unboxed(there, first.seal(b"still here")).message
    joined(there)
    assert unboxed(there, first.seal(b"still here")).message
    assert not unboxed(there, second.seal(b"?")).message
    assert there.address_of(lost) is None


def test_answers_go_to_where_a_client_was_heard_last() -> None:
    there = broker()
    here, sender = joined(there)
    assert there.open(b"another place", here.seal(b"moved")) is not None
    found = there.seal(sender, b"there")
    assert found is not None
    assert (found[0], there.address_of(sender), here.open(found[1])) == (b"another place", b"another place", b"there")


def test_no_key_is_shown() -> None:
    there = broker()
    here, _ = joined(there)
    shown = repr([vars(here), vars(there)])
    assert repr(WORKER.secret)[2:-1] not in shown
    assert "to_broker=" not in shown
    assert "token=" not in shown
