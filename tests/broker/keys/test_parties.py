"""Parties in a broker's register: listed by the plan, changed by it alone, and refused once they are not listed."""

import pytest

from stageline.broker.errors import NotEnrolled
from stageline.broker.keys.changes import Changed, KeyChange, KeyChangeFailed, Reloaded, carry_out
from stageline.broker.keys.pairs import KeyPair, PublicKey
from stageline.broker.keys.parties import Parties, Party, conflict, differences, digest_of
from stageline.broker.keys.register import Invitation, KeyRegister, Right

NOW = 1_000.0


def key(number: int) -> PublicKey:
    return KeyPair.of_secret(bytes([number]) * 32).public


def listed(*lab: int, rights: tuple[str, ...] = ("work",)) -> Parties:
    keys = tuple(key(each).text for each in lab or (2,))
    return Party("hospital", (key(1).text,), (0,)), Party("lab", keys, (1,), rights)


@pytest.fixture
def register() -> KeyRegister:
    made = KeyRegister()
    made.list_parties(listed(), NOW)
    return made


def order(register: KeyRegister, parties: Parties = (), **given: object) -> Changed:
    return carry_out(KeyChange(**given), register, lambda serial: key(100 + serial), NOW, lambda: parties)  # type: ignore[arg-type]


def test_a_partys_key_is_admitted_for_its_places_with_its_rights(register: KeyRegister) -> None:
    register.list_parties(listed(rights=("work", "look")), NOW)
    assert register.admits(key(1))
    known = register.enrolled(key(2).text)
    assert known is not None
    assert (known.party, known.places, known.rights) == ("lab", (1,), (Right.WORK, Right.LOOK))


def test_two_keys_are_admitted_during_a_change_and_the_old_one_is_refused_after_it(register: KeyRegister) -> None:
    assert register.list_parties(listed(2, 3), NOW) == ()
    assert register.admits(key(2))
    assert register.admits(key(3))
    assert register.list_parties(listed(3), NOW) == (key(2).text,)
    assert not register.admits(key(2))
    assert register.list_parties(listed(3), NOW) == ()
    register.list_parties(listed(2), NOW)
    assert register.admits(key(2))


def test_a_key_that_a_person_has_revoked_stays_so_until_a_person_admits_it(register: KeyRegister) -> None:
    order(register, what="revoke", key=key(2).text)
    register.list_parties(listed(), NOW)
    again = KeyRegister(register.record)
    assert not again.admits(key(2))
    order(again, what="admit", key=key(2).text)
    assert again.admits(key(2))
    assert again.record.parties == listed()


@pytest.mark.parametrize("first", ["revoked", "unlisted"])
def test_a_revoked_key_stays_so_when_the_plan_lists_it_again(register: KeyRegister, first: str) -> None:
    """A key that had leaked was revoked, and admitted again by a plan without it and one with it."""
    if first == "unlisted":
        register.list_parties(listed(3), NOW)
    order(register, what="revoke", key=key(2).text)
    assert register.list_parties(listed(3), NOW) == ()
    with pytest.raises(KeyChangeFailed, match="was a key of party lab, which the plan does not list any more"):
        order(register, what="admit", key=key(2).text)
    register.list_parties(listed(2, 3), NOW)
    again = KeyRegister(register.record)
    assert not again.admits(key(2))
    assert again.admits(key(3))
    order(again, what="admit", key=key(2).text)
    assert again.admits(key(2))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"what": "invite"}, r"the places of this run are its parties' \(hospital, lab\)"),
        ({"what": "invite", "rights": (Right.LOOK,), "worker": 1}, "the places of this run are its parties'"),
        ({"what": "admit", "key": key(9).text}, "the places of this run are its parties'"),
        ({"what": "admit", "key": key(2).text, "rights": (Right.LOOK,)}, r"change \[parties.lab\] on every side"),
        (
            {"what": "admit", "key": key(2).text, "worker": 0},
            "is a key of party lab, whose workers and rights the plan",
        ),
    ],
)
def test_orders_give_no_place_and_change_no_party(register: KeyRegister, given: dict[str, object], said: str) -> None:
    before = register.record
    with pytest.raises(KeyChangeFailed, match=said):
        order(register, **given)
    assert register.record == before


def test_who_is_to_watch_is_invited_and_admitted(register: KeyRegister) -> None:
    assert isinstance(order(register, what="invite", rights=(Right.LOOK,)).about, Invitation)
    order(register, what="admit", key=key(9).text, rights=(Right.LOOK,))
    assert register.admits(key(9))


def test_a_partys_key_has_no_successor_by_itself(register: KeyRegister) -> None:
    with pytest.raises(NotEnrolled, match=r"write the other as next_key into \[parties.lab\]"):
        register.enrol(key(2).text, key(9), NOW)


def test_a_reload_tells_what_has_changed_and_who_is_refused(register: KeyRegister) -> None:
    found = order(register, listed(3), what="reload")
    assert isinstance(found.about, Reloaded)
    assert found.revoked == (key(2).text,)
    (change,) = found.about.changes
    assert f"its key is {key(3).short} here, {key(2).short} there" in change
    assert order(register, listed(3), what="reload") == Changed(Reloaded(listed(3), ()))
    with pytest.raises(KeyChangeFailed, match="the plan has no parties now, and the run began with"):
        order(register, what="reload")
    with pytest.raises(KeyChangeFailed, match="was a key of party lab, which the plan does not list any more"):
        order(register, what="admit", key=key(2).text)


def test_a_difference_names_the_party_and_both_digests() -> None:
    here, there = listed(), listed(2, rights=("work", "stop"))
    (said,) = differences(here, there)
    digests = [digest_of([each[1]])[:12] for each in (here, there)]
    assert said == f"party lab (digest {digests[0]} here, {digests[1]} there): it may work here, work stop there"
    assert not conflict(here, there)
    (said,) = differences(here, here[:1])
    assert said.endswith("only the plan here has it")
    assert conflict(here, here[:1])
    assert conflict(here, listed(3))
    assert not conflict(here, listed(3, 2))
    assert not [*differences(here, here)]
