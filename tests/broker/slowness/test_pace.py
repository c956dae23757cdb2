"""The pace of a run: steps per second, sums of its steps, and the step at which something has changed."""

from random import Random

import pytest

from stageline.broker.control.records import StepRecord
from stageline.broker.ledger.times import ENTRY, TimedWait, WaitCause
from stageline.broker.slowness.pace import HISTORY, WINDOW, RunPace, changed_at
from stageline.pipeline.schedule import Action, Kind, make_schedule
from support.packed import packed_times
from support.shapes import line

SCHEDULE = make_schedule("1f1b", line(2), 2)


def record(stage: int, step: int, *, disk: float = 0.0) -> StepRecord:
    """Half of each second is computed."""
    wait = [TimedWait(WaitCause.DISK, None, step - disk, float(step))] if disk else []
    return StepRecord(stage, step, packed_times([*wait, (Action(Kind.FORWARD, stage), float(step), step + 0.5)]))


def test_steps_per_second_are_those_of_the_last_minute_and_the_best_stay() -> None:
    pace = RunPace()
    assert pace.rate(0.0) is None
    for step in range(101):
        pace.reached(step, 1000.0 + step / 10)
    assert pace.rate(1010.0) == pytest.approx(10)
    assert pace.best == pytest.approx(10)
    for step in range(101, 301):
        pace.reached(step, 1010.0 + (step - 100))
    assert pace.rate(1210.0) == pytest.approx(1)
    assert pace.best == pytest.approx(10)
    assert pace.rate(1330.0) < 0.02  # it stands still


def reported(pace: RunPace, first: int, last: int, now: float) -> None:
    """Let both stages report steps, one of which ended in each second, at once."""
    pace.note(record(stage, step) for step in range(first, last) for stage in (0, 1))
    pace.reached(last, now)


def test_a_pause_is_neither_in_the_steps_per_second_nor_in_the_idle_time_nor_does_it_change_the_best() -> None:
    pace = RunPace()
    for step in range(1, 31):
        reported(pace, step - 1, step, float(step))
    assert pace.best == pytest.approx(1)
    pace.interrupted()
    for step in range(31, 61):
        late = [record(stage, step) for stage in (0, 1)]
        pace.note(each.__class__(each.stage, each.step, shifted(each.times, 600.0)) for each in late)
        pace.reached(step, step + 600.0)
    assert pace.rate(660.0) == pytest.approx(1)
    assert pace.best == pytest.approx(1)
    assert pace.idle(SCHEDULE, steps=40, since=31) == pytest.approx((0.5, 0.5))
    assert min(pace.idle(SCHEDULE, steps=40)) > 0.9


def shifted(times: bytes, seconds: float) -> bytes:
    """The same actions, later."""
    return b"".join(ENTRY.pack(*each[:2], *(at + seconds for at in each[2:])) for each in ENTRY.iter_unpack(times))


def test_a_broker_that_was_started_again_counts_late_reports_by_when_their_steps_ended() -> None:
    pace = RunPace()
    reported(pace, 70, 100, 160.0)
    reported(pace, 100, 160, 160.1)
    for step in range(160, 260):
        reported(pace, step, step + 1, step + 1.1)
    assert pace.best == pytest.approx(1, rel=0.05)


def test_the_end_of_a_step_is_by_the_brokers_clock_as_its_other_times() -> None:
    """`why` told people the time of day since when a run was slow, by the clock of a worker that was 500 s behind."""
    pace = RunPace()
    pace.note([record(0, 7), record(0, 8)])
    pace.note([record(1, 7), record(1, 8)], ahead=500.0)
    assert pace.ended(7) == 507.5
    assert pace.ended(9) is None


def test_steps_that_are_repeated_after_a_loss_are_no_better_pace() -> None:
    pace = RunPace()
    for step in range(140):
        pace.reached(step, float(step))
    for step in range(100, 139):
        pace.reached(step, 150 + 0.3 * (step - 100))
    for step in range(139, 240):
        pace.reached(step, 162.0 + (step - 139))
    assert pace.best == pytest.approx(1)


def test_steps_that_are_repeated_replace_those_that_were_lost() -> None:
    pace = RunPace()
    pace.note(record(stage, step) for step in range(10) for stage in (0, 1))
    pace.note([record(0, 6, disk=0.25)])
    assert [each.step for each in pace.history(0)] == [*range(6), 6]
    assert [each.step for each in pace.history(1)] == list(range(10))
    assert max(each.step for each in pace.recent() if each.stage == 0) == 6
    assert pace.history(0)[-1].disk == 0.25


def test_what_is_kept_is_bounded() -> None:
    pace = RunPace()
    for step in range(HISTORY + 500):
        pace.note([record(0, step)])
        pace.reached(step + 1, 1000.0 + step)
    assert len(pace.recent()) == WINDOW
    assert len(pace.history(0)) == HISTORY
    assert pace.recent(since=HISTORY + 490) == [record(0, step) for step in range(HISTORY + 490, HISTORY + 500)]


def test_idle_time_and_pauses_are_shares_and_means_of_a_step_and_those_of_workers_are_not_added_up() -> None:
    pace = RunPace()
    assert pace.idle(SCHEDULE) == ()
    pace.note(record(stage, step, disk=0.25) for step in range(10) for stage in (0, 1))
    assert pace.idle(SCHEDULE) == pytest.approx((0.5, 0.5))
    assert [each[WaitCause.DISK] for each in pace.paused(SCHEDULE, 5).values()] == [0.25, 0.25]


@pytest.mark.parametrize("seed", range(10))
def test_the_step_of_a_change_is_found_in_noise_and_none_where_there_is_none(seed: int) -> None:
    random = Random(seed)
    change = random.randint(20, 80)
    noisy = [(step, random.gauss(1.0, 0.1) + (step >= change)) for step in range(100)]
    found = changed_at(noisy)
    assert found is not None
    assert abs(found - change) <= 1
    assert changed_at([(step, random.gauss(1.0, 0.1)) for step in range(100)]) is None
    hiccup = [(step, random.gauss(1.0, 0.1) + 20 * (step == change)) for step in range(100)]
    assert changed_at(hiccup) is None
