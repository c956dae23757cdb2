"""Time that a run lost: the ends of steps around losses, restarts and stalls, of runs in which it is known."""

from collections.abc import Sequence

import pytest

from stageline.broker.ledger.milestones import KEPT_CHECKPOINTS, KEPT_EVENTS, Milestone, Milestones
from stageline.broker.slowness.lost_time import Setback, StepEnds

STEP = 0.5
LOSS = Milestone("loss", 50.2, 90, 1, "was killed by SIGKILL")
RETURN = Milestone("return", 53.0, 90, 1, "computes again")


def ends(count: int, *breaks: tuple[int, float]) -> dict[int, float]:
    """Steps end each half second, but for some that end so much later."""
    return {step: STEP * (step + 1) + sum(more for at, more in breaks if step >= at) for step in range(count)}


def found(known: dict[int, float], events: Sequence[Milestone], **more: dict[int, float]) -> list[Setback]:
    return StepEnds(known, **more).setbacks(events)


def test_a_loss_costs_the_time_until_new_steps_come_at_the_usual_pace() -> None:
    """The stage that is asked waits for the lost one, which repeats 10 steps: 8 s more in all."""
    (only,) = found(ends(200, (100, 8.0)), [LOSS, RETURN])
    assert (only.what, only.step, only.workers, only.why) == ("loss", 100, (1,), "was killed by SIGKILL")
    assert only.seconds == pytest.approx(8.0)
    assert only.waited == pytest.approx(2.8)


def test_a_step_that_still_ended_after_the_loss_does_not_hide_it() -> None:
    (only,) = found(ends(200, (102, 8.0)), [LOSS, RETURN])
    assert (only.what, only.step, only.seconds) == ("loss", 102, pytest.approx(8.0))


def test_of_a_stage_that_itself_went_back_the_repeated_steps_count_too() -> None:
    """Its steps from the checkpoint on ended again, after the loss: what they took before is lost."""
    repeated = ends(90) | {step: 53.5 + STEP * (step - 90) for step in range(90, 200)}
    (only,) = found(repeated, [LOSS, RETURN])
    assert (only.step, only.seconds) == (90, pytest.approx(53.5 - 45.0 - STEP))


def test_steps_that_are_slower_for_a_while_after_it_count_until_the_pace_is_back() -> None:
    (only,) = found(ends(200, (100, 4.0), (101, 1.0), (102, 0.7), (103, 0.1), (150, 0.6)), [LOSS, RETURN])
    assert only.seconds == pytest.approx(5.7)


@pytest.mark.parametrize("later", [4, 5, 20, 300])
def test_a_slower_pace_for_good_is_no_part_of_a_loss(later: int) -> None:
    """The worker that took the lost one's place is slower: 0.8 s a step, however long the run goes on."""
    slower = [(step, 0.3) for step in range(101, 100 + later)]
    (only,) = found(ends(100 + later, (100, 3.3), *slower), [LOSS, RETURN])
    assert (only.what, only.step) == ("loss", 100)
    assert only.seconds == pytest.approx(3.3)
    assert only.waited == pytest.approx(2.8)


def test_losses_during_a_recovery_are_one_setback_and_later_ones_are_others() -> None:
    second = Milestone("loss", 52.0, 90, 0, "was silent for 10.0 s")
    later = Milestone("loss", 82.3, 120, 0, "exited with status 3")
    one, other = found(ends(200, (100, 12.0), (140, 3.0)), [LOSS, second, later])
    assert (one.workers, one.seconds) == ((1, 0), pytest.approx(12.0))
    assert (other.workers, other.seconds) == ((0,), pytest.approx(3.0))


def test_a_restart_of_the_broker_counts_only_if_steps_have_waited_for_it() -> None:
    broker = Milestone("broker", 50.2, 100)
    assert found(ends(200), [broker]) == []
    (only,) = found(ends(200, (100, 5.0)), [broker])
    assert (only.what, only.seconds) == ("broker", pytest.approx(5.0))


def test_a_step_in_which_nothing_went_on_is_a_stall_unless_its_pause_is_known() -> None:
    known = ends(200, (120, 6.0))
    (only,) = found(known, [])
    assert (only.what, only.step, only.seconds) == ("stall", 120, pytest.approx(6.0))
    assert found(known, [], paused={120: 5.8}) == []
    assert found(ends(200, (120, 1.0)), []) == []  # a hiccup


def test_a_run_that_a_person_stopped_and_resumed_or_paused_has_lost_nothing() -> None:
    assert found(ends(200, (100, 3600.0)), [Milestone("resume", 3640.0, 100)]) == []
    assert found(ends(200, (100, 3600.0)), [], away={100: 3599.9}) == []


def test_of_steps_that_are_not_known_one_after_another_nothing_is_told() -> None:
    assert found({}, [LOSS]) == []
    assert found({step: STEP * step for step in range(0, 300, 10)}, [LOSS]) == []
    assert found(ends(2), [Milestone("loss", 0.6, 0, 1, "")]) == []


def test_checkpoints_displace_no_loss() -> None:
    kept = Milestones([LOSS, RETURN])
    for step in range(1000):
        kept.append(Milestone("checkpoint", 60.0 + step, step))
    assert list(kept)[:2] == kept.events == [LOSS, RETURN]
    assert len(list(kept)) == 2 + KEPT_CHECKPOINTS
    for step in range(1000):
        kept.append(Milestone("loss", 2000.0 + step, step, 0))
    assert len(kept.events) == KEPT_EVENTS
