"""Who may connect: invitations end, keys that have enrolled stay, and what was revoked is refused."""

import msgspec
import pytest

from stageline.broker.errors import NotEnrolled
from stageline.broker.keys.pairs import KeyPair, PublicKey, invite_pair
from stageline.broker.keys.register import MOST_KNOCKS, Invitation, KeyRecord, KeyRegister

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


def test_only_an_invitations_key_enrols_others() -> None:
    keys = register()
    keys.enrol(INVITED.text, key(1), 0)
    with pytest.raises(NotEnrolled):
        keys.enrol(key(1).text, key(2), 0)
    assert not keys.admits(key(2))


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
    keys.enrol(INVITED.text, key(2), 0)
    keys.revoke(key(2).text, 1)
    record = msgspec.msgpack.decode(msgspec.msgpack.encode(keys.record), type=KeyRecord)
    successor = KeyRegister(record)
    assert [successor.admits(each) for each in (INVITED, key(1), key(2), key(3))] == [True, True, False, False]
