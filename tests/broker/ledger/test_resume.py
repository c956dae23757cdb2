"""Where a resumed run begins: decided from the snapshots that all workers have read, before any has a place."""

import msgspec
import pytest

from stageline.broker.control.messages import Answer, Ask, Assigned, FromBroker, Hello, Refused, Report, Standby, Stop
from stageline.broker.control.records import Inspection, WorkerRecord
from stageline.broker.control.store import MemoryStore
from stageline.broker.coordinator.run import RunPhase, run_of
from stageline.broker.coordinator.state import Life
from stageline.broker.ledger.member import Member
from stageline.broker.ledger.recovery import CheckpointPoll, ResumePoint
from stageline.broker.ledger.registry import Registry
from support.conversation import PLAN, SNAPSHOTS, Conversation, having_read, hello, name, steps

BOTH = ((0,), (1,))
DAMAGE = "the snapshot stage-1/step-40 cannot be used: weights.safetensors is missing"


def seeing(claim: int | None, step: int, usable: list[int], *damages: str, there: list[tuple[int, int]]) -> Hello:
    return msgspec.structs.replace(
        hello(0), claim=claim, snapshots=there, inspection=Inspection(step, usable, list(damages))
    )


# The decision


def test_a_run_begins_at_the_newest_checkpoint_if_all_its_snapshots_can_be_used():
    read = [having_read(0, 40), having_read(1, 40)]
    assert CheckpointPoll(BOTH, 40).result(read) == ResumePoint(40)


def test_nothing_is_decided_before_the_snapshots_of_every_place_were_read():
    poll = CheckpointPoll(BOTH, 40)
    assert poll.result([]) is None
    assert poll.result([having_read(0, 40), hello(1)]) is None
    assert poll.result([having_read(0, 40), having_read(1, 20)]) is None  # an answer to another question
    assert poll.absent([having_read(0, 40), having_read(1, 20)]) == [1]
    assert poll.result([having_read(1, 40, DAMAGE, there=[20])]) is None


def test_a_damaged_snapshot_leads_to_the_next_older_step_of_which_all_stages_have_one():
    poll = CheckpointPoll(BOTH, 40)
    read = [having_read(0, 40, there=[10, 20, 30]), having_read(1, 40, DAMAGE, there=[10, 20])]
    again = CheckpointPoll(BOTH, 20, (DAMAGE,), frozenset({40}))
    assert poll.result(read) == again
    assert again.result(read) is None
    assert again.result([having_read(0, 20), having_read(1, 20)]) == ResumePoint(20, (DAMAGE,))


def test_a_newer_step_that_all_stages_have_is_better_than_an_older_one():
    """Its completion was not recorded when the broker was killed, or the records are those of a while ago."""
    read = [having_read(0, 40, there=[20, 60]), having_read(1, 40, DAMAGE, there=[20, 60, 80])]
    newer = CheckpointPoll(BOTH, 60, (DAMAGE,), frozenset({40}))
    assert CheckpointPoll(BOTH, 40).result(read) == newer
    worse = DAMAGE.replace("40", "60")
    read = [having_read(0, 60, worse, there=[20, 40]), having_read(1, 60, there=[20, 40])]
    assert newer.result(read) == CheckpointPoll(BOTH, 20, (DAMAGE, worse), frozenset({40, 60}))


def test_a_damaged_one_there_leads_further_back_and_in_the_end_nowhere():
    poll = CheckpointPoll(BOTH, 20, (DAMAGE,), frozenset({40}))
    older = DAMAGE.replace("40", "20")
    read = [having_read(0, 20, older, there=[10]), having_read(1, 20, there=[10, 40])]
    assert poll.result(read) == CheckpointPoll(BOTH, 10, (DAMAGE, older), frozenset({20, 40}))
    assert poll.result([read[0], having_read(1, 20)]) == ResumePoint(None, (DAMAGE, older))


def test_the_beginning_is_no_checkpoint():
    read = [having_read(0, 40, there=[0]), having_read(1, 40, DAMAGE, there=[0])]
    assert CheckpointPoll(BOTH, 40).result(read) == ResumePoint(None, (DAMAGE,))


def test_workers_that_take_any_place_count_for_as_many_as_they_are():
    shared = [(stage, step) for stage in (0, 1) for step in (20, 40)]
    unclaimed = seeing(None, 40, [0, 1], there=shared)
    poll = CheckpointPoll(BOTH, 40)
    assert poll.absent([unclaimed]) == [1]
    assert poll.result([unclaimed, unclaimed]) == ResumePoint(40)
    damaged = seeing(None, 40, [0], DAMAGE, there=shared)
    assert poll.result([damaged, damaged]) == CheckpointPoll(BOTH, 20, (DAMAGE,), frozenset({40}))


def test_only_the_snapshots_that_the_claimant_of_a_place_can_read_count():
    of_one = [(1, 40), (1, 20)]
    read = [seeing(0, 40, [0, 1], there=[(0, 40), (0, 20), *of_one]), seeing(1, 40, [], DAMAGE, there=[(1, 40)])]
    assert CheckpointPoll(BOTH, 40).result(read) == ResumePoint(None, (DAMAGE,))


def test_a_snapshot_that_no_worker_has_is_named_by_its_stage():
    unclaimed = seeing(None, 40, [0], there=[(0, 40)])
    assert CheckpointPoll(BOTH, 40).result([unclaimed, unclaimed]) == ResumePoint(
        None, ("no worker has a snapshot of step 40 of stage 1",)
    )


# What the broker makes of it


@pytest.fixture
def talk() -> Conversation:
    """A run whose checkpoint 40 was complete when its processes were gone, and that is resumed."""
    before = Conversation(terms=SNAPSHOTS)
    for index in (0, 1):
        before.join(index)
        more = {"snapshots": [(index, 20), (index, 40)], "steps": steps(index, *range(47), loss=0.5), "number": 1}
        before.send(name(index), Report(index + 1, 9, "computes", 0.0, 0.0, **more))
    assert before.status()["checkpoint"] == 40
    assert run_of(before.store, PLAN, "run-2", b"", resume=True, alone=True) == "run-1"
    return Conversation(before.store, now=200.0, terms=SNAPSHOTS)


def question(sends: list[tuple[bytes, FromBroker]]) -> Standby:
    ((_, standby),) = sends
    assert isinstance(standby, Standby)
    return standby


def test_no_worker_is_placed_before_all_have_read_their_snapshots(talk):
    first = question(talk.send(name(0), hello(0)))
    assert (first.run, first.step) == ("run-1", 40)
    assert talk.after(1.0) == []
    assert question(talk.send(name(0), having_read(0, 40))).step == 40
    talk.after(0.5)
    assert talk.status()["missing"] == [1]
    assert question(talk.send(name(0), having_read(0, 40))).reason.endswith("it waits for worker 1 (stage 1)")
    assert talk.core.run.registry.members == {}
    ((_, why),) = talk.send(b"me", Ask("why"))
    assert isinstance(why, Answer)
    assert why.facts["text"] == (
        "the run continues when all workers have verified their snapshots of step 40; it waits for worker 1 (stage 1)"
    )


def test_with_nothing_damaged_the_run_begins_at_the_newest_checkpoint(talk):
    for index in (0, 1):
        talk.send(name(index), having_read(index, 40))
    talk.after(0.1)
    given = [talk.assigned(name(index), having_read(index, 40)) for index in (0, 1)]
    assert [each.step for each in given] == [40, 40]
    assert (talk.status()["damaged"], talk.core.run.events.warnings) == ([], [])


def fall_back(talk: Conversation) -> None:
    talk.send(name(0), having_read(0, 40, there=[20]))
    talk.send(name(1), having_read(1, 40, DAMAGE, there=[20]))
    assert talk.after(0.1) == []
    assert [question(talk.send(name(index), having_read(index, 40))).step for index in (0, 1)] == [20, 20]
    for index in (0, 1):
        talk.send(name(index), having_read(index, 20))
    talk.after(0.1)


def test_a_damaged_checkpoint_is_named_and_all_stages_begin_at_the_older_one_under_new_incarnations(talk):
    before = talk.core.run.registry.incarnation
    fall_back(talk)
    given = [talk.assigned(name(index), having_read(index, 20)) for index in (0, 1)]
    assert [each.step for each in given] == [20, 20]
    assert before <= given[0].since < given[0].incarnation < given[1].incarnation
    assert talk.core.run.ledger.finished == [20, 20]
    assert set(talk.store.load().losses) == set(range(47))
    instead = "checkpoint 40 cannot be used: the run begins at checkpoint 20 instead"
    assert talk.status()["damaged"] == [DAMAGE, instead]
    assert talk.status()["checkpoint"] == 20
    assert {DAMAGE, instead} <= set(talk.core.run.events.warnings)


def test_the_records_catch_up_with_a_newer_checkpoint_that_the_run_begins_at(talk):
    talk.send(name(0), having_read(0, 40, there=[60]))
    talk.send(name(1), having_read(1, 40, DAMAGE, there=[60]))
    talk.after(0.1)
    for index in (0, 1):
        talk.send(name(index), having_read(index, 60))
    talk.after(0.1)
    given = [talk.assigned(name(index), having_read(index, 60)) for index in (0, 1)]
    assert [each.step for each in given] == [60, 60]
    assert talk.status()["damaged"] == [DAMAGE, "checkpoint 40 cannot be used: the run begins at checkpoint 60 instead"]
    again = Conversation(talk.store, now=talk.now + 3.0, terms=SNAPSHOTS)
    assert (again.core.run.checkpoints.complete, again.core.run.ledger.finished) == (60, [60, 60])


def test_a_decision_is_stored_before_it_is_sent(talk):
    fall_back(talk)
    again = Conversation(talk.store, now=talk.now + 3.0, terms=SNAPSHOTS)
    assert again.core.run.checkpoints.complete == 20
    assert question(again.send(name(0), hello(0))).step == 20  # no worker had a place: the snapshots are read again
    assert again.core.run.ledger.finished == [20, 20]


def test_a_broker_that_dies_when_places_were_given_does_not_ask_again(talk):
    fall_back(talk)
    given = talk.assigned(name(0), having_read(0, 20))
    again = Conversation(talk.store, now=talk.now + 3.0, terms=SNAPSHOTS)
    assert again.assigned(name(0), having_read(0, 20)) == given
    assert again.assigned(name(1), hello(1)).step == 20


def test_without_an_older_checkpoint_the_run_ends_and_names_what_is_damaged(talk):
    talk.send(name(0), having_read(0, 40, there=[20]))
    talk.send(name(1), having_read(1, 40, DAMAGE))
    stops = [message for _, message in talk.after(0.1) if isinstance(message, Stop)]
    assert [stop.code for stop in stops] == [1, 1]
    assert DAMAGE in stops[0].reason
    assert (talk.core.run.phase, talk.core.run.checkpoints.complete) == (RunPhase.FAILED, 40)


def test_a_worker_of_the_former_run_is_refused_and_a_spare_stands_by(talk):
    ((_, refused),) = talk.send(name(0), msgspec.structs.replace(hello(0), incarnation=1))
    assert isinstance(refused, Refused)
    ((_, refused),) = talk.send(name(0), hello(9))
    assert isinstance(refused, Refused)
    assert "there is no worker 9" in refused.reason
    spare = msgspec.structs.replace(hello(0), claim=None, spare=True)
    assert question(talk.send(b"spare", spare)).step == 0
    assert talk.status()["missing"] == [0, 1]


def test_a_worker_without_recent_messages_is_absent(talk):
    talk.send(name(0), having_read(0, 40))
    talk.after(5.0)
    talk.send(name(1), having_read(1, 40))
    talk.after(0.1)
    assert talk.status()["missing"] == [0]


def test_a_worker_that_knows_more_than_the_records_ends_the_roll_call(talk):
    memory = WorkerRecord("run-1", 0, 60, 61)
    talk.send(name(0), msgspec.structs.replace(hello(0), incarnation=10**9, memory=memory, snapshots=[(0, 60)]))
    assert talk.core.run.lifecycle.state is Life.RECONCILING
    assert talk.core.run.lifecycle.state is not Life.CHOOSING_CHECKPOINT


def test_a_run_without_a_complete_checkpoint_begins_at_once():
    store = MemoryStore()
    Conversation(store, terms=SNAPSHOTS).join(0)
    run_of(store, PLAN, "run-2", b"", resume=True, alone=True)
    again = Conversation(store, now=200.0, terms=SNAPSHOTS)
    assert isinstance(again.assigned(name(0), hello(0)), Assigned)


def test_a_run_without_records_waits_ten_minutes_for_the_workers_with_its_snapshots_and_a_spare_does_not_count():
    store = MemoryStore()
    run_of(store, PLAN, "run-1", b"", resume=True)
    talk = Conversation(store, now=200.0, terms=SNAPSHOTS)
    spare = msgspec.structs.replace(hello(1), claim=None, spare=True, snapshots=[])
    talk.send(name(0), msgspec.structs.replace(hello(0), snapshots=[(0, 20)]))
    talk.send(name(1), spare)
    talk.after(599.0)
    assert talk.core.run.phase is RunPhase.WAITING
    talk.after(2.0)
    assert talk.core.run.phase is RunPhase.FAILED
    assert "which snapshots exist of worker 1 (stage 1)" in str(talk.status()["reason"])


def test_a_worker_without_a_claim_gets_a_place_that_it_has_snapshots_of():
    """Two machines, each with the snapshots of its own stage, came in the other order than before."""
    registry = Registry(BOTH)
    has_of_1 = seeing(None, 20, [1], there=[(1, 20)])
    placed = registry.register(has_of_1, b"a", 0.0)
    assert isinstance(placed, Member)
    assert placed.index == 1
