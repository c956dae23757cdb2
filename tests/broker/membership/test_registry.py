"""Who gets which place, who keeps it, and who is lost."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stageline.broker.control.protocol import CONTROL_VERSION, Hello, Refused, Report
from stageline.broker.membership.failure_detector import EXIT_GRACE, STARTUP, describe_exit
from stageline.broker.membership.member import Member, MemberStatus, stages_label
from stageline.broker.membership.registry import Registry

PLACEMENT = ((0, 2), (1,))
LEASE = 10.0


def hello(name: str, *, pid: int = 1, claim: int | None = None, incarnation: int = 0, endpoint: str = "") -> Hello:
    return Hello(CONTROL_VERSION, "plan", name, "desk", pid, endpoint, claim, incarnation)


def report(incarnation: int, actions: int, now: str = "1F3 of step 7") -> Report:
    return Report(incarnation, actions, now, since=0.0, idle=0.0)


def placed(registry: Registry, name: str, claim: int | None = None, now: float = 0.0) -> Member:
    member = registry.register(hello(name, claim=claim), name.encode(), now)
    assert isinstance(member, Member)
    return member


def introduced(registry: Registry, name: str, claim: int | None = None, now: float = 0.0) -> Member:
    member = placed(registry, name, claim, now)
    again = hello(name, claim=claim, incarnation=member.incarnation, endpoint=f"ipc://{name}")
    assert registry.register(again, name.encode(), now) is member
    return member


def refusal(registry: Registry, said: Hello, now: float = 0.0) -> Refused:
    found = registry.register(said, b"someone", now)
    assert isinstance(found, Refused)
    return found


@pytest.fixture
def registry() -> Registry:
    return Registry(PLACEMENT, LEASE)


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
    placed.sender = b""  # of the records of a broker that was killed, and not heard since
    assert refusal(registry, hello("desk-3", claim=1), now=0.3).reason == (
        "stage 1 belonged to worker desk-2 (pid 812, host desk) before the broker restarted; it may still be running"
    )


def test_a_full_house_is_refused_naming_everyone(registry: Registry):
    placed(registry, "anna"), placed(registry, "berta")
    found = refusal(registry, hello("carla"))
    assert "0 is anna (pid 1, host desk), 1 is berta (pid 1, host desk)" in found.reason
    assert "stop the other first" in refusal(registry, hello("carla", claim=0)).reason


def test_a_place_that_the_plan_has_not_is_refused(registry: Registry):
    found = refusal(registry, hello("anna", claim=2))
    assert (found.reason, found.code) == ("there is no worker 2: the plan has workers 0 to 1", 2)


def test_a_hello_said_twice_gives_one_place(registry: Registry):
    assert placed(registry, "anna") is placed(registry, "anna")
    assert registry.missing == [1]


def test_a_process_that_has_forgotten_its_incarnation_is_another_one(registry: Registry):
    introduced(registry, "anna", claim=0)
    assert "stages 0 and 2 are claimed by worker anna" in refusal(registry, hello("anna", claim=0)).reason


def test_an_incarnation_that_is_not_current_is_refused(registry: Registry):
    placed(registry, "anna")
    assert "incarnation 7 of anna is not current" in refusal(registry, hello("anna", incarnation=7)).reason


def test_the_line_is_complete_when_everyone_has_said_where_it_is(registry: Registry):
    introduced(registry, "anna")
    berta = placed(registry, "berta")
    assert not registry.complete
    registry.register(hello("berta", incarnation=berta.incarnation, endpoint="ipc://berta"), b"berta", 0.0)
    assert registry.complete
    assert registry.peers == {0: (1, "ipc://anna"), 1: (2, "ipc://berta")}


@given(st.lists(st.tuples(st.sampled_from("abcdef"), st.sampled_from([None, 0, 1]), st.booleans())))
def test_incarnations_only_ever_grow_and_no_place_is_given_twice(arrivals: list[tuple[str, int | None, bool]]):
    registry, handed_out = Registry(PLACEMENT, LEASE), [0]
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


def test_a_silent_worker_is_lost_after_a_lease(registry: Registry):
    anna = introduced(registry, "anna")
    registry.note_contact(anna, b"anna", 5.0)
    assert registry.losses(14.9) == []
    (loss,) = registry.losses(15.1)
    assert (loss.member, loss.why) == (anna, "was silent for 10.1 s (recovery.lease is 10 s)")


def test_a_worker_that_has_not_begun_may_take_longer(registry: Registry):
    placed(registry, "anna")
    assert registry.losses(LEASE + 1) == []
    assert len(registry.losses(STARTUP)) == 1


def beats(registry: Registry, member: Member, *reports: tuple[float, int, str]) -> None:
    for now, actions, doing in reports:
        registry.note_contact(member, b"", now)
        registry.note_report(member, report(member.incarnation, actions, doing), now)


def test_a_worker_that_computes_without_progress_is_lost_though_it_reports(registry: Registry):
    anna = introduced(registry, "anna")
    beats(registry, anna, (1.0, 5, "0F3"), (6.0, 5, "0F3"), (11.0, 5, "0F3"))
    (loss,) = registry.losses(11.0)
    assert loss.why.startswith("is alive, but completed no action for 10.0 s; if one may take this long, raise")


def test_a_worker_that_waits_or_gets_on_is_not_lost(registry: Registry):
    anna, berta = introduced(registry, "anna"), introduced(registry, "berta")
    beats(registry, anna, (1.0, 5, "0F3"), (6.0, 5, "waits for backward-0"), (11.0, 5, "0B3"))
    beats(registry, berta, (1.0, 5, "1F3"), (6.0, 6, "1F3"), (11.0, 6, "1B3"))
    assert registry.losses(11.0) == []


def test_a_finished_worker_need_not_get_on(registry: Registry):
    anna = introduced(registry, "anna")
    anna.status = MemberStatus.FINISHED
    beats(registry, anna, (1.0, 5, "0U"), (9.0, 5, "0U"), (15.0, 5, "0U"))
    assert registry.losses(15.0) == []


def test_a_worker_whose_process_is_gone_is_lost_once_its_last_words_have_had_time(registry: Registry):
    anna = introduced(registry, "anna")
    anna.exited = (2.0, -9)
    assert registry.losses(2.0) == []
    (loss,) = registry.losses(2.0 + EXIT_GRACE)
    assert (loss.why, loss.status) == ("was killed by SIGKILL", -9)


def test_all_leases_begin_anew_when_the_broker_was_away(registry: Registry):
    anna = introduced(registry, "anna")
    beats(registry, anna, (1.0, 5, "0F3"))
    registry.restart_leases(100.0)
    assert registry.losses(109.0) == []


def test_another_broker_adopts_workers_with_their_incarnations(registry: Registry):
    introduced(registry, "anna"), placed(registry, "berta")
    other = Registry(PLACEMENT, LEASE)
    other.restore(registry.facts(), now=50.0)
    assert other.peers == {0: (1, "ipc://anna")}
    assert other.members[1].incarnation == registry.members[1].incarnation
    assert [loss.member.name for loss in other.losses(60.0)] == ["anna"]
    found = other.register(hello("anna", incarnation=1, endpoint="ipc://anna"), b"new", 51.0)
    assert isinstance(found, Member)
    assert (found.index, found.sender) == (0, b"new")


def test_an_adopted_registry_reuses_no_incarnation(registry: Registry):
    registry.free(placed(registry, "anna"))
    other = Registry(PLACEMENT, LEASE)
    other.restore(registry.facts(), now=50.0)
    assert placed(other, "berta").incarnation == 2


@pytest.mark.parametrize(
    ("status", "words"),
    [(0, "exited with status 0"), (78, "exited with status 78"), (-11, "was killed by SIGSEGV"), (-77, "by signal 77")],
)
def test_an_exit_status_in_words(status: int, words: str):
    assert re.search(f"{words}$", describe_exit(status))


def test_stages_label():
    assert [stages_label(range(n)) for n in (1, 2, 3)] == ["stage 0", "stages 0 and 1", "stages 0, 1 and 2"]
