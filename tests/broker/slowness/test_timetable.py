"""Timetables of steps: measured below planned, with the cause of each stretch without an action."""

import pytest

from stageline.broker.slowness.steps import Clocks
from stageline.broker.slowness.timetable import tables
from stageline.pipeline.schedule import Schedule, make_schedule
from support.shapes import line
from support.slow_steps import SlowRun

SCHEDULE = make_schedule("1f1b", line(3), 4)


def run(schedule: Schedule = SCHEDULE, **changes: object) -> SlowRun:
    return SlowRun(schedule, (0.01, 0.01, 0.01), changes.pop("lag", (0.0001, 0.0001)), noise=0.0, **changes)


def idle(step: dict, worker: int) -> dict[str, float]:
    """Seconds that a worker waited, by cause."""
    found: dict[str, float] = {}
    for each in step["idle"]:
        if each["worker"] == worker:
            found[each["cause"]] = found.get(each["cause"], 0.0) + each["end"] - each["start"]
    return found


def test_a_step_has_every_action_measured_and_planned_and_between_them_no_time_without_a_cause() -> None:
    facts = tables(run().records(3, 0), lambda step: SCHEDULE, Clocks())
    assert [each["step"] for each in facts["steps"]] == [0, 1, 2]
    assert (facts["step"], facts["actions"]) == (2, facts["steps"][2]["actions"])
    step = facts["steps"][2]
    ran = {(each["kind"], each["stage"], each["microbatch"]) for each in step["actions"]}
    assert ran == {(each["kind"], each["stage"], each["microbatch"]) for each in step["planned"]}
    for worker in range(3):
        spans = [(e["start"], e["end"]) for e in (*step["actions"], *step["idle"]) if e["worker"] == worker]
        begin, end = min(spans)[0], max(end for _, end in spans)
        covered = sum(until - since for since, until in spans)
        assert covered == pytest.approx(end - begin, abs=1e-4)


def test_a_wait_is_the_schedules_until_its_message_is_sent_and_the_wires_from_then_on() -> None:
    near = tables(run().records(3, 0), lambda step: SCHEDULE, Clocks())["steps"][2]
    far = tables(run(lag=(0.03, 0.0001)).records(3, 0), lambda step: SCHEDULE, Clocks())["steps"][2]
    assert idle(near, 1)["schedule"] > 10 * idle(near, 1).get("wire", 0.0)
    assert idle(far, 1)["wire"] >= 0.03
    assert far["seconds"] > near["seconds"]


@pytest.mark.parametrize("cause", ["data", "disk", "evaluation"])
def test_a_pause_has_its_cause(cause: str) -> None:
    slow = run(every=2, **{cause: 0.5})
    facts = tables(slow.records(5, 0), lambda step: SCHEDULE, Clocks())
    (step,) = [each for each in facts["steps"] if each["step"] == 4]
    assert idle(step, 0)[cause] == pytest.approx(0.5, abs=1e-3)


def test_clocks_are_aligned_no_message_is_taken_before_it_was_sent() -> None:
    slow = run(ahead={0: 0.0, 1: 3.0, 2: -3.0}, lag=(0.002, 0.002))
    hosts = {0: "a", 1: "b", 2: "c"}
    for ahead in (slow.ahead, {}):  # without offsets, the messages alone tell
        facts = tables(slow.records(3, 0), lambda step: SCHEDULE, Clocks(ahead, hosts))
        at = {(e["kind"], e["stage"], e["microbatch"]): e for e in facts["actions"]}
        forward = [at["F", stage, m]["end"] <= at["F", stage + 1, m]["start"] for stage in (0, 1) for m in range(4)]
        backward = [at["B", stage + 1, m]["end"] <= at["B", stage, m]["start"] for stage in (0, 1) for m in range(4)]
        assert all([*forward, *backward])


def test_each_step_is_compared_with_the_schedule_that_was_valid_then() -> None:
    other = make_schedule("gpipe", line(3), 4)
    before, after = run().records(4, 0), run(other).records(4, 0)
    records = [each for each in before if each.step < 2] + [each for each in after if each.step >= 2]
    facts = tables(records, lambda step: SCHEDULE if step < 2 else other, Clocks())
    assert [each["schedule"] for each in facts["steps"]] == ["1f1b", "1f1b", "gpipe", "gpipe"]
    orders = [
        [(e["kind"], e["microbatch"]) for e in sorted(step["planned"], key=lambda e: e["start"]) if e["worker"] == 0]
        for step in facts["steps"]
    ]
    assert orders[0] == orders[1] == [(a.kind, a.microbatch) for a in SCHEDULE.workers[0]]
    assert orders[2] == orders[3] == [(a.kind, a.microbatch) for a in other.workers[0]]


def test_without_records_there_is_no_step() -> None:
    assert tables([], lambda step: SCHEDULE, Clocks())["step"] is None


def test_activations_that_come_from_files_are_a_wait_within_the_backward() -> None:
    step = tables(run(offload=0.004).records(3, 0), lambda step: SCHEDULE, Clocks())["steps"][2]
    waits = [each for each in step["idle"] if each["cause"] == "offload"]
    backwards = [each for each in step["actions"] if each["kind"] == "B"]
    assert len(waits) == len(backwards)
    for wait in waits:
        assert any(each["start"] <= wait["start"] < wait["end"] <= each["end"] for each in backwards)
