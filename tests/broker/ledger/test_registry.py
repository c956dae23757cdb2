"""Who gets which place, who keeps it, and who is lost."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stageline.broker.control.messages import Hello, Refused
from stageline.broker.ledger.member import Member
from stageline.broker.ledger.registry import Registry
from support.registered import PLACEMENT, hello, introduced, lost, placed


def refusal(registry: Registry, said: Hello, now: float = 0.0) -> Refused:
    found = registry.register(said, b"someone", now)
    assert isinstance(found, Refused)
    return found


@pytest.fixture
def registry() -> Registry:
    return Registry(PLACEMENT)


def test_workers_get_the_places_that_are_free_in_turn(registry: Registry):
    anna, berta = placed(registry, "anna"), placed(registry, "berta")
    assert (anna.index, anna.stages, anna.incarnation) == (0, (0, 2), 1)
    assert (berta.index, berta.stages, berta.incarnation) == (1, (1,), 2)
    assert registry.missing == []


def test_a_claim_is_honoured(registry: Registry):
    assert placed(registry, "anna", claim=1).index == 1
    assert registry.missing == [0]


def test_a_taken_place_is_refused_naming_its_owner_and_the_way_out(registry: Registry):
    placed = registry.register(hello("desk-2", pid=812, claim=1), b"desk-2", 0.0)
    found = refusal(registry, hello("desk-3", claim=1), now=0.3)
    assert found.code == 1
    assert found.reason == (
        "stage 1 is claimed by worker desk-2 (pid 812, host desk), alive 0.3 s ago; "
        "start this one without --index or stop the other"
    )
    assert isinstance(placed, Member)
    placed.sender = b""  # from the records of a killed broker; it has sent nothing since
    assert refusal(registry, hello("desk-3", claim=1), now=0.3).reason == (
        "stage 1 belonged to worker desk-2 (pid 812, host desk) before the broker restarted; it may still be running"
    )


def test_a_worker_too_many_is_refused_naming_all_others(registry: Registry):
    placed(registry, "anna"), placed(registry, "berta")
    found = refusal(registry, hello("carla"))
    assert "0 is anna (pid 1, host desk), 1 is berta (pid 1, host desk)" in found.reason
    assert "stop the other first" in refusal(registry, hello("carla", claim=0)).reason


def test_a_place_that_the_plan_has_not_is_refused(registry: Registry):
    found = refusal(registry, hello("anna", claim=2))
    assert (found.reason, found.code) == ("there is no worker 2: the plan has workers 0 to 1", 2)


def test_a_repeated_hello_gives_one_place(registry: Registry):
    assert placed(registry, "anna") is placed(registry, "anna")
    assert registry.missing == [1]


def test_a_process_that_has_forgotten_its_incarnation_is_another_one(registry: Registry):
    introduced(registry, "anna", claim=0)
    assert "stages 0 and 2 are claimed by worker anna" in refusal(registry, hello("anna", claim=0)).reason


def test_an_incarnation_that_is_not_current_is_refused(registry: Registry):
    placed(registry, "anna")
    assert "incarnation 7 of anna is not current" in refusal(registry, hello("anna", incarnation=7)).reason


def test_the_registry_is_complete_when_all_workers_have_named_their_endpoints(registry: Registry):
    introduced(registry, "anna")
    berta = placed(registry, "berta")
    assert not registry.complete
    registry.register(hello("berta", incarnation=berta.incarnation, endpoint="ipc://berta"), b"berta", 0.0)
    assert registry.complete
    assert registry.peers == {0: (1, "ipc://anna"), 1: (2, "ipc://berta")}


@given(st.lists(st.tuples(st.sampled_from("abcdef"), st.sampled_from([None, 0, 1]), st.booleans())))
def test_incarnations_only_ever_grow_and_no_place_is_given_twice(arrivals: list[tuple[str, int | None, bool]]):
    registry, handed_out = Registry(PLACEMENT), [0]
    for name, claim, leaves in arrivals:
        before = dict(registry.members)
        member = registry.register(hello(name, claim=claim), name.encode(), 0.0)
        if isinstance(member, Refused) or member in before.values():
            continue
        assert member.index not in before
        assert member.incarnation > handed_out[-1]
        handed_out.append(member.incarnation)
        if leaves:
            registry.free(member)


def test_another_broker_adopts_workers_with_their_incarnations(registry: Registry):
    introduced(registry, "anna"), placed(registry, "berta")
    other = Registry(PLACEMENT)
    other.restore(registry.facts(), now=50.0)
    assert other.peers == {0: (1, "ipc://anna")}
    assert other.members[1].incarnation == registry.members[1].incarnation
    assert [loss.member.name for loss in lost(other, 60.0)] == ["anna"]
    found = other.register(hello("anna", incarnation=1, endpoint="ipc://anna"), b"new", 51.0)
    assert isinstance(found, Member)
    assert (found.index, found.sender) == (0, b"new")


def test_an_adopted_registry_reuses_no_incarnation(registry: Registry):
    registry.free(placed(registry, "anna"))
    other = Registry(PLACEMENT)
    other.restore(registry.facts(), now=50.0)
    assert placed(other, "berta").incarnation == 2
