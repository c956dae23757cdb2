"""Time that a run lost, as its broker tells it: from its records alone, also once it was started again."""

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from stageline.broker.control.messages import Answer, Ask
from stageline.broker.control.pace_answers import WhyFacts
from stageline.broker.control.records import StepRecord
from stageline.broker.coordinator.setbacks import lost_time
from stageline.broker.ledger.pauses import Pause
from stageline.broker.ledger.times import TimedWait, WaitCause, last_end, timed_actions
from support.conversation import Conversation, name
from support.packed import packed_times
from support.replacements import REPLACING, kill, replacement, said, talk_of
from support.slow_steps import EPOCH, SlowRun

RUN = SlowRun(REPLACING.schedule, (0.05, 0.05), (0.0001,), noise=0.01)
CHECKPOINT, LOST_AT, STEPS, LATER = 30, 35, 60, 9.0


def moved(record: StepRecord, seconds: float) -> StepRecord:
    """The record as it is at so many seconds on the clock of the test, which begins at 0."""
    by = seconds - EPOCH
    times = packed_times((action, start + by, end + by) for action, start, end in timed_actions(record))
    return msgspec.structs.replace(record, times=times)


class Told:
    """A run of two workers that is told of its steps; the clock of worker 1's machine is ahead by `ahead` seconds."""

    def __init__(self, ahead: float = 0.0) -> None:
        self.talk, self.ahead = talk_of(), ahead
        self._as = {0: (name(0), 1), 1: (name(1), 2)}

    def replaced(self, ahead: float | None = None) -> None:
        """Worker 1 is killed; its place is taken 4 seconds later, when its machine's clock is `ahead`."""
        self.ahead = self.ahead if ahead is None else ahead
        kill(self.talk, 1, 101)
        self.talk.now += 4.0
        self.talk.assigned(b"new", replacement(1, 201))
        self.talk.send(b"new", replacement(1, 201, 3, "ipc://new"))
        self._as[1] = b"new", 3

    def tell(self, record: StepRecord) -> None:
        self.talk.now = max(self.talk.now, last_end(record.times) or 0.0)
        sender, incarnation = self._as[record.stage]
        done = record.step + 1
        snapshots = {"snapshots": [(record.stage, done)]} if done == CHECKPOINT else {}
        report = said(incarnation, stage=record.stage, actions=10 * done, **snapshots)
        off = self.ahead if record.stage == 1 else 0.0
        seen = moved(record, EPOCH + off) if off else record
        self.talk.send(sender, msgspec.structs.replace(report, steps=[seen], clock=(-off, 0.001)))


@pytest.fixture(scope="module")
def talk() -> Conversation:
    """Worker 1 was killed in step 35, and repeated the steps from 30 on; then the run went on, 9 seconds later."""
    return run_with_a_loss(0.0, 0.0)


def run_with_a_loss(before: float, after: float) -> Conversation:
    """The clock of worker 1's machine is ahead by so many seconds before the loss and after it."""
    told, records = Told(before), RUN.records(STEPS, 0)
    for record in records:
        if record.step < LOST_AT:
            told.tell(moved(record, 0.0))
    told.replaced(after)
    for record in records:
        if record.step >= LOST_AT or (record.stage == 1 and record.step >= CHECKPOINT):
            told.tell(moved(record, LATER))
    return told.talk


@pytest.mark.parametrize(
    ("before", "after"), [(500.0, 500.0), (-500.0, -500.0), (0.0, 60.0), (0.0, -60.0), (60.0, 0.0)]
)
def test_a_clock_that_is_off_or_was_set_hides_no_loss_and_is_no_stall(before: float, after: float) -> None:
    """The ends of steps were compared with the time of the loss, which is by another clock, and with each other."""
    found = recovery(run_with_a_loss(before, after))
    assert [(each["what"], each["workers"]) for each in found["setbacks"]] == [("loss", [1])]
    assert found["seconds"] == pytest.approx(LATER, rel=0.05)


def recovery(talk: Conversation) -> Any:
    ((_, answer),) = talk.send(b"me", Ask("why"))
    assert isinstance(answer, Answer)
    msgspec.convert(answer.facts, WhyFacts)
    return answer.facts["recovery"]


def test_why_tells_what_a_loss_has_cost_and_what_would_have_made_it_cheaper(talk: Conversation) -> None:
    found = recovery(talk)
    (only,) = found["setbacks"]
    assert (only["what"], only["workers"], only["step"]) == ("loss", [1], CHECKPOINT)
    assert only["seconds"] == found["seconds"] == pytest.approx(LATER, rel=0.05)
    assert 4.0 < only["waited"] < LATER
    assert "worker 1 was killed by SIGKILL" in only["text"]
    assert found["share"] == pytest.approx(found["seconds"] / talk.now, rel=0.05)
    assert "1 loss" in found["text"]
    assert found["remedies"]


def test_a_broker_that_was_started_again_tells_it_from_its_store(talk: Conversation) -> None:
    again = Conversation(talk.store, talk.now, REPLACING)
    before, after = recovery(talk), lost_time(again.core.run)
    assert after is not None
    assert after["setbacks"] == before["setbacks"]


def test_the_steps_around_an_old_loss_are_read_from_the_store(
    talk: Conversation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are more steps ago than a broker keeps."""
    run = Conversation(talk.store, talk.now, REPLACING).core.run
    monkeypatch.setattr("stageline.broker.coordinator.pacing._FILLED", 8)
    monkeypatch.setattr("stageline.broker.coordinator.pacing._SAMPLED", 1)
    found = lost_time(run)
    assert found is not None
    assert len(run.pace.history(1)) < 20
    assert found["seconds"] == pytest.approx(LATER, rel=0.05)


def test_a_run_that_lost_nothing_has_no_such_answer() -> None:
    told = Told()
    for record in RUN.records(20, 0):
        told.tell(moved(record, 0.0))
    assert recovery(told.talk) is None


def test_a_step_before_which_both_workers_stood_still_is_a_stall_that_names_one_of_them() -> None:
    told = Told()
    for record in RUN.records(30, 0):
        told.tell(moved(record, 0.0 if record.step < 20 else 5.0))
    (only,) = recovery(told.talk)["setbacks"]
    assert (only["what"], only["step"]) == ("stall", 20)
    assert only["seconds"] == pytest.approx(5.0, rel=0.05)
    assert " did nothing before " in only["text"]


def test_a_message_that_was_long_on_its_way_is_a_stall_between_its_stages() -> None:
    told = Told()
    for record in RUN.records(30, 0):
        late = moved(record, 0.0 if record.step < 20 else 5.0)
        if record.step == 20 and record.stage == 0:  # its forwards were not late
            mixed = [
                (each[0], each[1] - 5.0, each[2] - 5.0) if each[0].kind == "F" else each for each in timed_actions(late)
            ]
            late = msgspec.structs.replace(late, times=packed_times(mixed))
        if record.step == 20 and record.stage == 1:
            _, start, _ = timed_actions(late)[0]
            waited = TimedWait(WaitCause.MESSAGE, 0, start - 5.0, start)
            late = msgspec.structs.replace(late, times=packed_times([waited, *timed_actions(late)]))
        told.tell(late)
    (only,) = recovery(told.talk)["setbacks"]
    assert (only["what"], only["hop"]) == ("stall", [0, 1])
    assert "no message came between stages 0 and 1" in only["text"]


@pytest.mark.parametrize("at", [20, 100])
def test_an_old_stall_is_found_among_the_records(at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The broker has been started again, as if only for this answer, and reads few of the steps."""
    told = Told()
    for record in RUN.records(160, 0):
        told.tell(moved(record, 0.0 if record.step < at else 5.0))
    monkeypatch.setattr("stageline.broker.coordinator.pacing._FILLED", 8)
    monkeypatch.setattr("stageline.broker.coordinator.pacing._SAMPLED", 2)
    run = Conversation(told.talk.store, told.talk.now, REPLACING).core.run
    found, told_before = lost_time(run), recovery(told.talk)
    assert len(run.pace.history(1)) < 20
    assert found is not None
    assert found["setbacks"] == told_before["setbacks"]
    assert found["share"] == pytest.approx(told_before["share"])


def later_from(record: StepRecord, first: int) -> StepRecord:
    """Its actions from the place `first` on are 5 seconds later, without waits before them."""
    entries = timed_actions(record)
    late = [(each[0], each[1] + 5.0, each[2] + 5.0) for each in entries[first:]]
    return msgspec.structs.replace(record, times=packed_times([*entries[:first], *late]))


def waited_for(record: StepRecord, cause: WaitCause, other: int) -> StepRecord:
    """It, with a wait of 5 seconds before its first action."""
    entries = timed_actions(record)
    waited = TimedWait(cause, other, entries[0][1] - 5.0, entries[0][1])
    return msgspec.structs.replace(record, times=packed_times([waited, *entries]))


def with_tail(changed: Callable[[StepRecord], StepRecord]) -> Told:
    """Steps from 20 on are 5 seconds later, as is the tail of step 19 at worker 0, which `changed` makes."""
    told = Told()
    for record in RUN.records(30, 0):
        late = moved(record, 0.0 if record.step < 20 else 5.0)
        if (record.step, record.stage) == (19, 0):
            late = changed(late)
        elif (record.step, record.stage) == (20, 1):
            late = waited_for(late, WaitCause.MESSAGE, 0)
        told.tell(late)
    return told


def in_last_backward(record: StepRecord) -> StepRecord:
    *others, (action, start, end), update = timed_actions(record)
    late = update[0], update[1] + 5.0, update[2] + 5.0
    return msgspec.structs.replace(record, times=packed_times([*others, (action, start, end + 5.0), late]))


def before_last_backward(record: StepRecord) -> StepRecord:
    return later_from(record, len(timed_actions(record)) - 2)


def waiting_for_last_message(record: StepRecord) -> StepRecord:
    *others, last, update = timed_actions(before_last_backward(record))
    waited = TimedWait(WaitCause.MESSAGE, 1, last[1] - 5.0, last[1])
    return msgspec.structs.replace(record, times=packed_times([*others, waited, last, update]))


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        (in_last_backward, "worker 0 was in 0B"),
        (before_last_backward, "worker 0 did nothing before 0B"),
        (waiting_for_last_message, "no message came between stages 0 and 1"),
        (lambda record: later_from(record, len(timed_actions(record)) - 1), "worker 0 did nothing before 0"),
    ],
)
def test_who_stood_still_at_the_end_of_a_step_that_the_last_stage_had_ended_is_found(
    changed: Callable[[StepRecord], StepRecord], said: str
) -> None:
    (only,) = recovery(with_tail(changed).talk)["setbacks"]
    assert (only["what"], only["step"]) == ("stall", 20)
    assert said in only["text"]


def test_who_stood_still_is_not_guessed() -> None:
    """Worker 0 waited for credit, and worker 1 for its message: neither did anything for long."""
    told = Told()
    for record in RUN.records(30, 0):
        late = moved(record, 0.0 if record.step < 20 else 5.0)
        if record.step == 20:
            late = waited_for(late, WaitCause.MESSAGE if record.stage else WaitCause.CREDIT, 1 - record.stage)
        told.tell(late)
    (only,) = recovery(told.talk)["setbacks"]
    assert "it is not recorded who stood still" in only["text"]


def test_a_pause_that_a_person_wanted_is_no_stall() -> None:
    told = Told()
    for record in RUN.records(30, 0):
        told.tell(moved(record, 0.0 if record.step < 20 else 50.0))
    stalled = recovery(told.talk)
    assert [each["what"] for each in stalled["setbacks"]] == ["stall"]
    since = stalled["setbacks"][0]["at"]
    told.talk.core.run.pauses.pauses.append(Pause("one", "", since - 0.1, 20, since + 50.0, "one"))
    assert recovery(told.talk) is None
