"""Who may connect: invitations end, keys that have enrolled stay, and what was revoked is refused."""

import msgspec
import pytest

from stageline.broker.errors import NotEnrolled
from stageline.broker.keys.pairs import KeyPair, PublicKey, invite_pair
from stageline.broker.keys.register import MOST_KNOCKS, Invitation, KeyRecord, KeyRegister, Right

INVITED = invite_pair(bytes(16)).public
DAY = 86_400.0


def key(number: int) -> PublicKey:
    return KeyPair.of_secret(bytes([number]) * 32).public


def register(**more: object) -> KeyRegister:
    made = KeyRegister()
    made.invite(Invitation(INVITED.text, ends=DAY, **more))  # type: ignore[arg-type]
    return made


def test_an_invitation_lets_a_key_enrol_which_stays_when_it_has_ended() -> None:
    keys = register()
    assert keys.admits(INVITED)
    assert not keys.admits(key(1))
    keys.enrol(INVITED.text, key(1), DAY - 1, name="worker-0", host="desk")
    keys.expire(DAY)
    assert not keys.admits(INVITED)
    assert keys.admits(key(1))
    with pytest.raises(NotEnrolled, match=r"ended.*stageline keys invite"):
        keys.enrol(INVITED.text, key(2), DAY)


def test_an_invitation_that_has_ended_enrols_none_although_it_was_not_looked_at_since() -> None:
    with pytest.raises(NotEnrolled, match="ended"):
        register().enrol(INVITED.text, key(1), DAY)


def test_a_key_that_is_not_known_enrols_no_other() -> None:
    keys = register()
    with pytest.raises(NotEnrolled):
        keys.enrol(key(1).text, key(2), 0)
    assert not keys.admits(key(2))


def test_a_key_has_one_successor_with_its_rights_and_its_place() -> None:
    keys = register(worker=2, rights=(Right.LOOK,))
    keys.enrol(INVITED.text, key(1), 0)
    made = keys.enrol(key(1).text, key(2), 5, name="lab-0", host="lab")
    assert (made.worker, made.rights, made.invitation) == (2, (Right.LOOK,), key(1).text)
    assert keys.enrol(key(1).text, key(2), 6) == made
    assert keys.admits(key(1))  # processes that run have it
    with pytest.raises(NotEnrolled, match=f"rotated before: {key(2).short} of host lab"):
        keys.enrol(key(1).text, key(3), 7)
    keys.revoke(key(1).text, 8)
    keys.enrol(key(2).text, key(3), 8)
    keys.revoke(key(3).text, 9)
    with pytest.raises(NotEnrolled, match="invitation has ended"):
        keys.enrol(key(3).text, key(4), 10)
    assert not keys.admits(key(4))


def test_who_is_revoked_does_not_come_back_by_the_line_or_by_a_key_of_before() -> None:
    """A machine that was revoked still had the line, enrolled another key with it, and went on."""
    keys = register()
    for number, predecessor in ((1, INVITED), (2, key(1)), (4, INVITED)):
        keys.enrol(predecessor.text, key(number), 0)
    keys.revoke(key(1).text, 0)
    keys.enrol(key(2).text, key(3), 0)
    assert keys.revoke(key(3).text, 9) == (key(3).text, key(2).text, key(1).text, INVITED.text)
    assert [keys.admits(each) for each in (INVITED, *map(key, range(1, 5)))] == [False, False, False, False, True]
    with pytest.raises(NotEnrolled):
        keys.enrol(INVITED.text, key(5), 10)
    assert keys.revoke(key(3).text, 11) == (key(3).text, key(2).text, key(1).text)  # an order that comes twice


def test_a_key_that_has_a_successor_is_revoked_without_it() -> None:
    keys = register()
    for number, predecessor in ((1, INVITED), (2, key(1))):
        keys.enrol(predecessor.text, key(number), 0)
    assert keys.revoke(key(1).text, 9) == (key(1).text,)
    assert [keys.admits(each) for each in (INVITED, key(1), key(2))] == [True, False, True]


def test_an_invitation_for_one_machine_has_two_keys_at_most() -> None:
    """A successor named its own, which named its own: 51 keys came by a line for one machine, and all stayed."""
    keys = register(once=True)
    keys.enrol(INVITED.text, key(1), 0)
    made = keys.enrol(key(1).text, key(2), 1)
    with pytest.raises(NotEnrolled, match=rf"`stageline keys revoke {key(1).text}` .* first, then rotate again"):
        keys.enrol(key(2).text, key(3), 2)
    assert not keys.admits(key(3))
    assert keys.enrol(key(1).text, key(2), 3) == made  # says so again
    keys.revoke(key(1).text, 4)
    assert keys.enrol(key(2).text, key(3), 5).invitation == key(2).text


def test_successors_are_revoked_in_one_order_with_the_line_that_they_came_by() -> None:
    """Who had the key named the next successor at once, each time that the operator had revoked one."""
    keys = register()
    for number, predecessor in ((1, INVITED), (2, key(1)), (4, INVITED)):
        keys.enrol(predecessor.text, key(number), 0)
    keys.revoke(key(1).text, 1)
    keys.enrol(key(2).text, key(3), 2)
    assert keys.revoke(key(1).text, 3, successors=True) == tuple(
        each.text for each in (key(1), INVITED, key(2), key(3))
    )
    assert [keys.admits(each) for each in (INVITED, *map(key, range(1, 5)))] == [False, False, False, False, True]
    with pytest.raises(NotEnrolled):
        keys.enrol(key(3).text, key(5), 4)
    keys = register()
    keys.enrol(INVITED.text, key(1), 0)
    keys.enrol(key(1).text, key(2), 1)
    assert keys.revoke(INVITED.text, 2, successors=True) == (INVITED.text, key(1).text, key(2).text)


def test_of_more_keys_than_there_may_be_a_person_admits_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each key could have a successor: bounds by invitation were none."""
    monkeypatch.setattr("stageline.broker.keys.register.MOST_KEYS", 2)
    keys = register()
    keys.enrol(INVITED.text, key(1), 0)
    keys.enrol(key(1).text, key(2), 0)
    for invitation in (INVITED.text, key(2).text):
        with pytest.raises(NotEnrolled, match=f"2 keys have enrolled .*keys admit {key(3).text}"):
            keys.enrol(invitation, key(3), 0)
    keys.admit(key(3), 0)
    assert keys.enrol(INVITED.text, key(3), 0).key == key(3).text


def test_the_first_key_has_an_invitation_for_one_and_may_say_so_again() -> None:
    keys = register(once=True, worker=2)
    first = keys.enrol(INVITED.text, key(1), 5, name="worker-2", host="desk")
    assert keys.enrol(INVITED.text, key(1), 6) == first
    assert first.worker == 2
    with pytest.raises(NotEnrolled, match="for one machine, and worker-2 on host desk has used it"):
        keys.enrol(INVITED.text, key(2), 7)


def test_a_revoked_key_is_refused_also_with_an_invitation_until_a_person_admits_it() -> None:
    keys = register()
    keys.enrol(INVITED.text, key(1), 0, host="desk")
    assert keys.revoke(key(1).text, 3)
    assert not keys.admits(key(1))
    keys.invite(Invitation(INVITED.text, ends=DAY))
    with pytest.raises(NotEnrolled, match=rf"revoked: `stageline keys admit {key(1).text}`"):
        keys.enrol(INVITED.text, key(1), 4)
    assert keys.admit(key(1), 5).host == "desk"
    assert keys.admits(key(1))
    assert not keys.revoke(key(2).text, 6)


def test_a_revoked_invitation_enrols_none_and_the_keys_of_before_stay() -> None:
    keys = register()
    keys.enrol(INVITED.text, key(1), 0)
    assert keys.revoke(INVITED.text, 1)
    assert not keys.admits(INVITED)
    assert keys.admits(key(1))


def test_keys_that_knock_in_vain_are_told_once_each_the_newest_last_and_not_without_bound() -> None:
    keys = register()
    for number in [*range(1, 40), 30]:
        assert not keys.admits(key(number))
    told = keys.knocks
    assert len(told) == MOST_KNOCKS
    assert told[-2:] == (key(39).text, key(30).text)
    assert told.count(key(30).text) == 1
    keys.admit(key(30), 0)
    assert key(30).text not in keys.knocks


def test_a_successor_that_has_the_record_admits_the_same_keys() -> None:
    keys = register()
    keys.enrol(INVITED.text, key(1), 0)
    keys.admit(key(2), 0)
    keys.revoke(key(2).text, 1)
    record = msgspec.msgpack.decode(msgspec.msgpack.encode(keys.record), type=KeyRecord)
    successor = KeyRegister(record)
    assert [successor.admits(each) for each in (INVITED, key(1), key(2), key(3))] == [True, True, False, False]
