"""Traces of runs for Perfetto: what the classes of its own package read from them."""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import pytest

from stageline.broker.slowness.steps import Clocks
from stageline.broker.slowness.timetable import tables
from stageline.pipeline.schedule import Schedule, make_schedule
from stageline.workers.extras.run_trace import RunTrace
from support.shapes import line
from support.slow_steps import EPOCH, SlowRun
from support.traces import ReadTrace, read_trace

Step = dict[str, Any]
SCHEDULE = make_schedule("1f1b", line(3), 4)
SCHEDULES = (
    SCHEDULE,
    make_schedule("gpipe", line(3), 4),
    make_schedule("zb-h1", line(3), 4),
    make_schedule("2bw", line(3), 4, mode="async"),
)
each_schedule = pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda each: f"{each.name}-{each.mode}")
WORKERS = [{"index": index, "stages": [index], "host": f"host-{index}", "pid": 100 + index} for index in range(3)]


def steps_of(schedule: Schedule = SCHEDULE, steps: int = 6, clocks: Clocks | None = None, **changes: Any) -> list[Step]:
    run = SlowRun(schedule, (0.01, 0.02, 0.01), (0.003, 0.001), **changes)
    facts: Any = tables(run.records(steps, 0), lambda step: schedule, clocks or Clocks())
    return list(facts["steps"])


def packets(steps: Sequence[Step], **more: Any) -> Iterator[bytes]:
    made = RunTrace("small-1", WORKERS, more.get("losses", {}), more.get("milestones", ()))
    for step in steps:
        yield from made.of_step(step)
    yield from made.rest(newest=more.get("newest", True))


def read(steps: Sequence[Step], **more: Any) -> ReadTrace:
    return read_trace(packets(steps, **more))


@each_schedule
def test_a_trace_has_every_action_and_every_wait_once_on_the_track_of_its_worker(schedule: Schedule) -> None:
    steps = steps_of(schedule)
    trace = read(steps)
    shown = sorted((each.track.partition(" on ")[0], each.name, each.notes["step"]) for each in actions(trace))
    ran = sorted(
        (
            f"worker {each['worker']}",
            each["kind"] + ("" if each["kind"] == "U" else str(each["microbatch"])),
            at["step"],
        )
        for at in steps
        for each in at["actions"]
    )
    assert shown == ran
    waits = [each for each in trace.slices if each.track.endswith("/waits")]
    idle = [each for step in steps for each in step["idle"] if each["cause"] != "loop"]
    assert sorted(each.notes["cause"] for each in waits) == sorted(each["cause"] for each in idle)
    seconds = sum(each.end - each.start for each in waits) / 1e9
    assert seconds == pytest.approx(sum(each["end"] - each["start"] for each in idle), rel=1e-3)


@each_schedule
def test_arrows_lead_a_microbatch_through_all_stages_and_back(schedule: Schedule) -> None:
    trace = read(steps_of(schedule))
    back = "I" if schedule.name == "zb-h1" else "B"
    for step in range(6):
        for microbatch in range(4):
            of = [
                each
                for each in actions(trace)
                if (each.notes["step"], each.notes.get("microbatch")) == (step, microbatch)
            ]
            (flow,) = {flow for each in of for flow in (*each.flows, *each.ends)}
            way = sorted((each for each in of if flow in (*each.flows, *each.ends)), key=lambda each: each.start)
            assert [each.name for each in way] == [f"F{microbatch}"] * 3 + [f"{back}{microbatch}"] * 3
            assert [each.track[-1] for each in way] == list("012210")
            assert way[-1].ends == (flow,)


def actions(trace: ReadTrace) -> list[Any]:
    return [each for each in trace.slices if "/stage " in each.track]


@each_schedule
def test_what_waits_to_be_written_is_no_more_than_the_steps_that_overlap(schedule: Schedule) -> None:
    steps = steps_of(schedule, 40)
    made, written = RunTrace("small-1", WORKERS, {}, ()), 0
    for place, step in enumerate(steps):
        written += sum(1 for _ in made.of_step(step))
        complete = sum(len(each["actions"]) for each in steps[: max(0, place - 3)])
        assert written >= 2 * complete  # a begin and an end


def test_clocks_that_are_apart_do_not_turn_an_arrow_around() -> None:
    ahead = {0: 0.0, 1: 3.0, 2: -3.0}
    steps = steps_of(ahead=ahead, clocks=Clocks(ahead, {0: "a", 1: "b", 2: "c"}), noise=0.0)
    way = [each for each in actions(read(steps)) if each.notes["step"] == 5 and each.notes.get("microbatch") == 2]
    forward = sorted((each for each in way if each.name == "F2"), key=lambda each: each.track)
    assert all(before.end <= after.start for before, after in pairwise(forward))


def test_steps_whose_clocks_were_aligned_otherwise_than_those_before_do_not_overlap_them() -> None:
    steps = steps_of()
    for step in steps[3:]:
        for each in (*step["actions"], *step["idle"]):
            if each["worker"] == 1:
                each["start"], each["end"] = each["start"] - 0.05, each["end"] - 0.05
    assert len(actions(read(steps))) == len(actions(read(steps_of())))


def test_losses_and_the_pace_are_counted_at_the_end_of_each_step_and_messages_while_they_are_in_flight() -> None:
    steps = steps_of()
    counts = read(steps, losses={2: 0.5, 3: None, 4: 0.25}).counts
    assert [value for _, value in counts["run small-1/loss"]] == [0.5, 0.25]
    ends = [step["start"] + step["seconds"] for step in steps]
    pace = [1 / (after - before) for before, after in pairwise(ends)]
    assert [value for _, value in counts["run small-1/steps per second"]] == pytest.approx(pace, rel=1e-3)
    flying = [name for name in counts if "/in flight" in name]
    assert sorted(name[-6:] for name in flying) == ["0 to 1", "1 to 0", "1 to 2", "2 to 1"]
    for name in flying:
        values = [value for _, value in counts[name]]
        assert len(values) == 2 * 6 * 4
        assert min(values) == values[-1] == 0
        assert 1 <= max(values) <= 4


def milestone(what: str, at: float, worker: int | None = None, why: str = "") -> dict[str, object]:
    return {"what": what, "at": EPOCH + at, "step": 2, "worker": worker, "why": why}


def test_checkpoints_losses_and_returns_are_instants_of_the_steps_that_are_shown() -> None:
    steps = steps_of()
    end = steps[-1]["start"] + steps[-1]["seconds"] - EPOCH
    told = [
        milestone("return", 0.3, 1, "computes again"),
        milestone("loss", 0.2, 1, "was killed by SIGKILL"),
        milestone("checkpoint", end + 1),
        milestone("checkpoint", -1.0),
    ]
    shown = [(each.name, each.notes.get("why")) for each in read(steps, milestones=told).instants]
    lost = [("loss of worker 1", "was killed by SIGKILL"), ("return of worker 1", "computes again")]
    assert shown == [*lost, ("checkpoint", None)]
    earlier = read(steps, milestones=told, newest=False).instants  # of a part of a run: what comes later is not its own
    assert [(each.name, each.notes.get("why")) for each in earlier] == lost
