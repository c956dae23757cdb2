"""Steps as they were measured: what an action waited for, how long its message was on its way, and by whose clock."""

import pytest

from stageline.broker.ledger.times import WaitCause
from stageline.broker.slowness.steps import Clocks, MeasuredSteps
from stageline.pipeline.schedule import make_schedule
from support.shapes import line
from support.slow_steps import SlowRun

SCHEDULE = make_schedule("1f1b", line(3), 4)


def measured(**changes: object) -> MeasuredSteps:
    run = SlowRun(SCHEDULE, (0.01, 0.02, 0.01), (0.03, 0.005), noise=0.0, **changes)
    return MeasuredSteps.of(SCHEDULE, run.records(6, 0))


def test_the_lag_of_messages_is_known_from_those_that_were_waited_for() -> None:
    lags = measured().lags()
    assert lags[0, 1] == pytest.approx(0.03, abs=1e-4)
    assert lags[2, 1] == pytest.approx(0.005, abs=1e-4)


def test_each_worker_is_busy_for_the_time_of_its_actions_without_data_and_waits() -> None:
    steps = measured(data=0.2, disk=0.3, every=2)
    assert steps.busy() == pytest.approx((0.1205, 0.241, 0.1205), rel=0.01)
    assert sum(each.data for each in steps.workers[0]) == pytest.approx(6 * 0.2, rel=0.01)
    assert sum(each.pauses.get(WaitCause.DISK, 0) for each in steps.workers[1]) == pytest.approx(2 * 0.3, rel=0.01)


def test_only_steps_that_all_stages_have_reported_count() -> None:
    records = SlowRun(SCHEDULE, (0.01,) * 3, (0.001,) * 2).records(4, 0)
    kept = [each for each in records if (each.step, each.stage) != (2, 1)]
    assert MeasuredSteps.of(SCHEDULE, kept).steps == (0, 1, 3)


def test_workers_of_one_machine_have_one_clock_the_one_that_is_known_best() -> None:
    clocks = Clocks.of({0: (0.010, 0.005), 1: (0.012, 0.001), 2: (3.0, 0.01)}, {0: "a", 1: "a", 2: "b"})
    assert [clocks.of_worker(worker) for worker in range(3)] == [0.012, 0.012, 3.0]
    assert clocks.shared(0, 1)
    assert not clocks.shared(1, 2)
    assert Clocks.of({0: (0.01, 0.005), 1: (0.02, 0.005)}, {0: "a", 1: "a"}).of_worker(1) == 0.0


def test_machines_of_one_name_whose_clocks_differ_are_several() -> None:
    clocks = Clocks.of({0: (0.0, 0.001), 1: (3.0, 0.01)}, {0: "vm", 1: "vm"})
    assert not clocks.shared(0, 1)
    assert [clocks.of_worker(worker) for worker in (0, 1)] == [0.0, 3.0]


def test_an_offset_that_is_wrong_by_more_than_a_messages_way_is_mended_by_the_messages() -> None:
    ahead = {0: 0.0, 1: 3.0, 2: -3.0}
    run = SlowRun(SCHEDULE, (0.01,) * 3, (0.002, 0.002), noise=0.0, ahead=ahead)
    wrong = Clocks({0: 0.0, 1: 3.02, 2: -3.05}, {0: "a", 1: "b", 2: "c"})
    steps = MeasuredSteps.of(SCHEDULE, run.records(6, 0), wrong)
    sent = [(each.source.end, each.start) for each in steps.all if each.source is not None]
    assert len(sent) == 6 * 4 * 4
    assert all(end <= start for end, start in sent)
    assert steps.lags()[0, 1] == pytest.approx(0.002, abs=1e-3)


def test_an_action_whose_result_is_taken_has_ended_though_its_worker_noted_that_later() -> None:
    noted_late = SlowRun(SCHEDULE, (0.01,) * 3, (-0.0005, -0.0005), noise=0.0, ahead={0: 0.0, 1: 3.0, 2: 0.0})
    clocks = Clocks({0: 0.0, 1: 3.0, 2: 0.0}, {0: "a", 1: "b", 2: "a"})
    steps = MeasuredSteps.of(SCHEDULE, noted_late.records(6, 0), clocks)
    sent = [(each.source, each) for each in steps.all if each.source is not None]
    assert len(sent) == 6 * 4 * 4
    assert all(source.start < source.end <= each.start for source, each in sent)
