"""The ledger, from a table of one microbatch's life to random histories told late, twice and with gaps."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stageline.broker.control.records import Event, StepRecord
from stageline.broker.ledger.ledger import (
    Holder,
    IllegalTransition,
    Ledger,
    LedgerEntry,
    MicrobatchPosition,
    MicrobatchState,
)
from stageline.pipeline.schedule import Action, Kind
from support.packed import packed_times

ANNA = Holder("anna", 1)
LIFE = (
    MicrobatchState.QUEUED,
    MicrobatchState.FORWARD,
    MicrobatchState.STASHED,
    MicrobatchState.BACKWARD,
    MicrobatchState.DONE,
)


def event(state: str, at: float, *, stage: int = 0, step: int = 0, microbatch: int = 0) -> Event:
    return Event(stage, step, microbatch, state, at)


def record(stage: int, step: int, *, loss: float | None = None) -> StepRecord:
    return StepRecord(stage, step, packed_times([(Action(Kind.FORWARD, stage), 0.0, 1.0)]), loss)


def told(*events: Event) -> Ledger:
    ledger = Ledger(stages=2, microbatches=2)
    for each in events:
        ledger.enter(each, ANNA)
    return ledger


def test_a_microbatch_goes_through_its_states_in_turn():
    ledger = told()
    seen = []
    for at, state in enumerate(LIFE, start=1):
        ledger.enter(event(state, at), ANNA)
        seen.append(ledger.entry(MicrobatchPosition(0, 0, 0)))
    assert seen == [
        LedgerEntry(MicrobatchState.QUEUED),
        *(LedgerEntry(state, at, ANNA) for at, state in enumerate(LIFE[1:], start=2)),
    ]


def test_a_forward_only_stage_is_done_after_forward():
    ledger = told(event("forward", 1), event("done", 2))
    assert ledger.entry(MicrobatchPosition(0, 0, 0)) == LedgerEntry(MicrobatchState.DONE, 2, ANNA)


def test_a_microbatch_without_reports_is_queued():
    assert told().entry(MicrobatchPosition(1, 7, 1)) == LedgerEntry(MicrobatchState.QUEUED)


def test_a_second_delivery_changes_nothing():
    ledger = told(event("forward", 1), event("stashed", 2), event("forward", 1), event("stashed", 2))
    assert ledger.entry(MicrobatchPosition(0, 0, 0)) == LedgerEntry(MicrobatchState.STASHED, 2, ANNA)


def test_a_late_event_changes_nothing():
    ledger = told(event("backward", 3), event("forward", 1), event("stashed", 2))
    assert ledger.entry(MicrobatchPosition(0, 0, 0)) == LedgerEntry(MicrobatchState.BACKWARD, 3, ANNA)


def test_a_microbatch_that_goes_back_is_refused_by_name():
    ledger = told(event("backward", 3, step=7, microbatch=1))
    with pytest.raises(IllegalTransition, match="microbatch 1 of step 7 cannot go from backward to forward at stage 0"):
        ledger.enter(event("forward", 4, step=7, microbatch=1), ANNA)
    assert ledger.entry(MicrobatchPosition(0, 7, 1)) == LedgerEntry(MicrobatchState.BACKWARD, 3, ANNA)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (event("forward", 1, stage=2), "there is no stage 2: the plan has 2"),
        (event("forward", 1, microbatch=2), "there is no microbatch 2: a step has 2"),
        (
            event("lost", 1),
            "no microbatch can be 'lost': queued, forward, stashed, backward, input, halfway, weight, done",
        ),
    ],
)
def test_an_event_that_cannot_be_is_refused_with_the_reason(wrong: Event, words: str):
    with pytest.raises(IllegalTransition, match=words):
        told(wrong)


@given(st.data())
def test_samples_of_a_history_in_any_order_and_number_give_its_latest_state(data: st.DataObject):
    history = [event(state, at) for at, state in enumerate(LIFE, start=1)]
    samples: Sequence[Event] = data.draw(st.lists(st.sampled_from(history), min_size=1))
    latest = max(samples, key=lambda each: each.at)
    entry = told(*samples).entry(MicrobatchPosition(0, 0, 0))
    assert entry.state == latest.state


def test_a_step_record_finishes_the_step_and_all_before_it():
    ledger = told(event("stashed", 1, step=3), event("forward", 2, step=4), event("forward", 3, step=5))
    ledger.finish(record(0, 4))
    assert ledger.finished == [5, 0]
    assert ledger.entry(MicrobatchPosition(0, 4, 0)) == LedgerEntry(MicrobatchState.DONE)
    assert [str(held) for held in ledger.held([0])] == ["0F0 of step 5"]


def test_an_event_of_a_finished_step_is_late():
    ledger = told()
    ledger.finish(record(0, 4))
    ledger.enter(event("forward", 9, step=4), ANNA)
    assert ledger.held([0]) == []


def test_the_floor_is_the_first_step_that_some_stage_has_not_finished():
    ledger = told()
    floors = []
    for stage, step in [(0, 0), (0, 1), (1, 0), (1, 2), (0, 2), (1, 1)]:
        ledger.finish(record(stage, step))
        floors.append(ledger.finished_floor)
    assert floors == [0, 0, 1, 2, 3, 3]


def test_times_that_are_not_whole_actions_are_refused():
    with pytest.raises(IllegalTransition, match="step 3 of stage 1 has 15 bytes of times; an action takes 21"):
        told().finish(StepRecord(1, 3, bytes(15)))


def test_times_of_an_action_that_there_is_not_are_refused():
    times = packed_times([(Action(Kind.FORWARD, 1), 0.0, 1.0)])
    with pytest.raises(IllegalTransition, match=r"step 3 of stage 1 .*'x'"):
        told().finish(StepRecord(1, 3, times.replace(b"F", b"x")))


@pytest.mark.parametrize(
    ("microbatch", "end", "wrong"),
    [(2, 1.0, "F2.* 2 microbatches"), (1, float("inf"), "F1.* inf"), (1, float("nan"), "F1.* nan")],
)
def test_times_that_no_action_of_a_step_can_have_are_refused(microbatch: int, end: float, wrong: str):
    """Timelines are drawn, and schedules chosen, by them."""
    ledger = told()
    times = packed_times([(Action(Kind.FORWARD, 1, microbatch), 0.0, end)])
    with pytest.raises(IllegalTransition, match=f"step 3 of stage 1 .*{wrong}"):
        ledger.finish(StepRecord(1, 3, times))
    assert ledger.finished[1] < 3


def test_losses_come_from_the_last_stage_and_are_kept_every_so_often():
    ledger = Ledger(stages=2, microbatches=2, log_every=10)
    for step in range(25):
        ledger.finish(record(0, step, loss=99.0))
        ledger.finish(record(1, step, loss=float(step)))
    assert ledger.losses == {0: 0.0, 10: 10.0, 20: 20.0}
    assert ledger.last_loss == (24, 24.0)


def test_the_loss_of_the_newest_step_that_every_stage_has_finished_is_kept_however_far_the_last_stage_is_ahead():
    ledger = Ledger(stages=2, microbatches=2, log_every=10)
    for step in range(5):
        ledger.finish(record(1, step, loss=float(step)))
        assert ledger.finished_loss is None
    for step in range(3):
        ledger.finish(record(0, step))
        assert ledger.finished_loss == (step, float(step))
    ledger.go_back([0], 1)
    ledger.finish(record(0, 3))
    assert ledger.finished_loss == (3, 3.0)


def test_a_loss_that_is_not_a_number_is_none_as_in_json():
    ledger = told()
    ledger.finish(record(1, 0, loss=float("nan")))
    ledger.finish(record(1, 1, loss=None))
    assert ledger.losses == {0: None, 1: None}


def test_a_late_record_still_brings_its_loss():
    ledger = told()
    ledger.finish(record(1, 1, loss=0.1))
    ledger.finish(record(1, 0, loss=0.2))
    assert ledger.losses == {0: 0.2, 1: 0.1}
    assert ledger.last_loss == (1, 0.1)


def test_what_is_held_is_what_was_begun_and_not_finished():
    ledger = told(
        event("stashed", 1, step=7),
        event("forward", 2, step=7, microbatch=1),
        event("queued", 2, stage=1, step=7),
        event("done", 3, stage=1, step=6),
        event("backward", 4, stage=1, step=6, microbatch=1),
    )
    assert [str(held) for held in ledger.held([0, 1])] == [
        "microbatch 0 of step 7, stashed at stage 0",
        "0F1 of step 7",
        "1B1 of step 6",
    ]


def test_a_restored_ledger_continues_where_the_last_one_was():
    ledger = Ledger(stages=2, microbatches=2, log_every=2)
    ledger.restore({0: 4, 1: 3}, {0: 0.5, 1: 0.4, 2: None})
    assert (ledger.finished, ledger.finished_floor) == ([4, 3], 3)
    assert (ledger.losses, ledger.last_loss) == ({0: 0.5, 2: None}, (2, None))
