"""Reports of the impossible have no effect, though a worker has the secret: they are counted and named."""

from dataclasses import replace

import pytest

from stageline.broker.control.checkpoints import Trim
from stageline.broker.control.messages import MOST_TIMES, Confirmed, Report
from stageline.broker.control.queue_counts import Depth, Intake, Resend, ResendReason
from stageline.broker.control.records import EvaluationRecord, Event, StepRecord, Wait
from stageline.broker.coordinator.reports import implausible, is_due
from stageline.broker.ledger.times import ENTRY
from support.conversation import SNAPSHOTS, Conversation, name, report, steps

TEN = replace(SNAPSHOTS, snapshot_every=10)


@pytest.fixture
def talk() -> Conversation:
    talk = Conversation(terms=TEN)
    talk.join(0), talk.join(1)
    for index in range(2):
        talk.send(name(index), report(index, number=1, steps=steps(index, *range(12)), training_steps=45))
    return talk


def wrong_in(talk: Conversation, sent: Report) -> str:
    talk.core.run.events.warnings.clear()
    talk.send(name(0), sent)
    return " ".join(talk.core.run.events.warnings)


@pytest.mark.parametrize("invented", [13, 4037, 2**53 - 1])
def test_steps_that_are_not_the_next_ones_are_not_believed(talk: Conversation, invented: int):
    """Of a run at step 40, checkpoint 4037 was complete: queues were trimmed, and snapshots deleted."""
    assert f"cannot have finished step {invented}: step 12 is its next" in wrong_in(
        talk, report(0, steps=steps(0, invented))
    )
    assert talk.core.run.ledger.finished == [12, 12]


def test_the_next_steps_and_those_that_are_repeated_are_right(talk: Conversation):
    assert wrong_in(talk, report(0, steps=steps(0, 10, 11, 12, 13))) == ""
    assert talk.core.run.ledger.finished == [14, 12]


@pytest.mark.parametrize(
    ("step", "wrong"),
    [
        (4037, "writes no snapshot of step 4037"),
        (11, "writes no snapshot of step 11"),
        (20, "has not come to step 20"),
        (45, "has not come to step 45"),
    ],
)
def test_snapshots_that_a_stage_cannot_have_are_not_believed(talk: Conversation, step: int, wrong: str):
    talk.send(name(1), report(1, snapshots=[(1, 10)]))
    assert wrong in wrong_in(talk, report(0, snapshots=[(0, step)]))
    assert talk.core.run.checkpoints.complete == 0
    assert not any(isinstance(message, Trim) for _, message in talk.after(1.0))
    assert wrong_in(talk, report(0, snapshots=[(0, 10)])) == ""
    assert talk.core.run.checkpoints.complete == 10


def test_a_snapshot_may_come_before_steps_that_no_longer_fit_into_its_report(talk: Conversation):
    """There are few steps in it, since their schedule is long."""
    times = ENTRY.pack(b"F", 0, 0.0, 1.0) * (MOST_TIMES // ENTRY.size)
    sent = report(0, steps=[StepRecord(0, 12, times)], snapshots=[(0, 20)])
    assert "has not come to step 20" in wrong_in(talk, sent)
    more = StepRecord(0, 12, times + ENTRY.pack(b"U", 0, 1.0, 2.0))
    assert wrong_in(talk, report(0, steps=[more], snapshots=[(0, 20)])) == ""


@pytest.mark.parametrize(("step", "due"), [(0, True), (10, True), (15, False), (45, True), (33, True), (34, False)])
def test_snapshots_are_due_every_so_often_and_at_the_ends(step: int, due: bool):
    assert is_due(step, 10, (45, 33)) is due
    assert is_due(step, 0, ())


def test_a_report_of_a_broker_that_was_away_may_jump_once(talk: Conversation):
    talk.core.run.registry.members[0].counted.clear()
    assert wrong_in(talk, report(0, steps=steps(0, 30))) == ""
    assert "is its next" in wrong_in(talk, report(0, steps=steps(0, 32)))


NAN = float("nan")


@pytest.mark.parametrize(
    "change",
    [
        {"since": NAN}, {"since": float("inf")}, {"since": -1.0}, {"idle": NAN}, {"idle": 1.5}, {"idle": -0.5},
        {"retained_bytes": -1}, {"troubled": NAN}, {"puts": {"forward-1": Depth(1, 1, 1, 1, -2.0)}},
        {"puts": {"forward-1": Depth(1, 1, 1, 1, NAN)}}, {"counted": NAN}, {"counted": -1.0},
        {"puts": {"forward-1": Depth(1, 1, 1, 1, 0.0, resends=(Resend(0, 1, ResendReason.MISSING, NAN),))}},
        {"takes": {f"forward-{each}": Intake(0, 0) for each in range(20_001)}},
        {"evaluations": [EvaluationRecord(1, 1)] * 501},
        {"waits": [Wait("forward-1", 1, "1F1", 0, NAN)]}, {"digests": [("forward-1", 1, "0" * 16)] * 5001},
        {"digests": [("forward-" + "1" * 900, 1, "0" * 16)]},
        {"digests": [("norms-0", 1, "0" * 16)]}, {"digests": [("forward-1\n", 1, "0" * 16)]},
    ],
    ids=lambda change: str(change)[:50],
)  # fmt: skip
def test_a_report_with_what_nothing_has_changes_nothing(talk: Conversation, change: dict[str, object]):
    fields = {"since": 1.0, "idle": 0.5, "steps": steps(0, 12), "number": 2, **change}
    sent = Report(1, 5, "0F1 of step 12", **fields)  # type: ignore[arg-type]
    assert implausible(sent, talk.core.run.registry.members[0])
    assert "reports what cannot be" in wrong_in(talk, sent)
    assert talk.core.run.ledger.finished == [12, 12]
    assert not any(isinstance(message, Confirmed) for _, message in talk.send(name(0), sent))
    assert talk.status()["oddities"] == {"implausible": 2}


@pytest.mark.parametrize("queue", ["forward-1", "backward-0", "evaluation-1", "verdict-0"])
def test_digests_of_the_queues_that_a_worker_has_an_end_of_are_taken(talk: Conversation, queue: str):
    assert wrong_in(talk, report(0, digests=[(queue, 1, "0" * 16)])) == ""


@pytest.mark.parametrize(
    "event", [Event(0, 2**50, 0, "forward", 1.0), Event(0, 12, 9, "forward", 1.0), Event(0, 12, 0, "forward", NAN)]
)
def test_events_that_cannot_be_are_left_out(talk: Conversation, event: Event):
    assert wrong_in(talk, report(0, events=[event]))
    assert talk.core.run.ledger.begun == 12
