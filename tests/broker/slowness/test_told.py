"""Why a run is slow: steps as workers would report them, of runs whose causes are known."""

import msgspec
import pytest

from stageline.broker.ledger.times import TimedWait, WaitCause, timed_actions, totals
from stageline.broker.slowness.pace import RunPace
from stageline.broker.slowness.steps import Clocks
from stageline.broker.slowness.told import slowness
from stageline.pipeline.schedule import make_schedule
from support.packed import packed_times
from support.shapes import line
from support.slow_steps import KINDS, SlowRun, drawn, named

STEPS = 45
EVEN, NEAR = (0.01, 0.01, 0.01), (0.0001, 0.0001)
SEEDS = [(kind, seed) for kind in KINDS for seed in range(3)]


def told(run: SlowRun, settings: dict[str, dict[str, object]] | None = None, *, steps: int = STEPS, seed: int = 0):
    clocks = Clocks(run.ahead, {worker: f"host-{worker}" for worker in run.ahead})
    pace = run.pace(steps, seed)
    return slowness(run.schedule, pace, since=0, settings=settings or {}, clocks=clocks, planned=None)


def three(**changes: object) -> SlowRun:
    return SlowRun(make_schedule("1f1b", line(3), 8), EVEN, NEAR, **changes)


@pytest.mark.parametrize(("kind", "seed"), SEEDS, ids=lambda each: str(each))
def test_the_answer_names_the_cause_and_its_place_and_no_other(kind: str, seed: int) -> None:
    case = drawn(kind, seed)
    facts = told(case.run, case.settings, seed=seed)
    assert facts is not None
    assert named(facts) == case.right
    assert bool(case.right) != ("nothing limits it but" in facts["text"])
    assert msgspec.json.decode(msgspec.json.encode(facts))["text"] == facts["text"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_in_at_least_95_of_100_runs_the_answer_is_right(kind: str) -> None:
    cases = [(seed, drawn(kind, seed)) for seed in range(3, 103)]
    right = [named(told(case.run, case.settings, seed=seed)) == case.right for seed, case in cases]
    assert sum(right) >= 95


def test_a_run_of_few_steps_has_no_answer() -> None:
    assert told(three(), steps=3) is None
    assert slowness(three().schedule, RunPace(), since=0, settings={}, clocks=Clocks(), planned=None) is None


@pytest.mark.parametrize("step", [12, 30])
def test_a_stage_that_has_become_slow_is_named_with_the_step_since_when(step: int) -> None:
    (found,) = told(three(changes=(1, step, 3.0)))["findings"]
    assert (found["cause"], found["stages"]) == ("compute", ["1"])
    assert abs(found["since"] - step) <= 1
    assert f"since step {found['since']}" in found["text"]
    run = three(changes=(1, step, 3.0))
    assert found["began"] == run.pace(STEPS, 0).ended(found["since"] - 1)


def test_of_one_process_that_computes_all_stages_in_turn_no_messages_are_named() -> None:
    """Each worker waits while another computes, and that time was taken for a way of messages."""
    run = SlowRun(make_schedule("1f1b", line(3), 8), EVEN, (0.03, 0.03))

    def found(in_turn: bool) -> dict:
        told = {"since": 0, "settings": {}, "clocks": Clocks(), "planned": None, "in_turn": in_turn}
        return slowness(run.schedule, run.pace(STEPS, 0), **told)

    assert {cause for cause, _ in named(found(False))} == {"wire"}
    assert not named(found(True))
    assert "one process computes all stages in turn" in found(True)["text"]


def test_of_a_long_line_the_slow_hop_is_found_and_all_hops_if_all_are_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stageline.broker.slowness.findings._HOPS", 2)
    schedule = make_schedule("1f1b", line(6), 8)
    one = SlowRun(schedule, (0.01,) * 6, (0.0001, 0.0001, 0.0001, 0.05, 0.0001))
    assert named(told(one)) == {("wire", 3)}
    every = named(told(SlowRun(schedule, (0.01,) * 6, (0.05,) * 5)))
    assert {cause for cause, _ in every} == {"wire"}


def test_evaluation_and_a_script_that_take_their_time_are_named() -> None:
    assert named(told(three(evaluation=4.0))) == {("evaluation", None)}
    assert named(told(three(script=0.2))) == {("script", None)}


def test_one_long_pause_of_a_script_long_ago_is_not_named_and_the_second_is() -> None:
    """One pause of a minute, averaged over 200 steps, was named in each of these."""

    def after(*paused: int) -> frozenset[tuple[str, int | None]]:
        run, pace = SlowRun(make_schedule("1f1b", line(2), 4), EVEN[:2], NEAR[:1], script=0.0001), RunPace()
        for record in run.records(200, 0):
            if record.step in paused:
                start = timed_actions(record)[0][1]
                wait = packed_times([TimedWait(WaitCause.SCRIPT, None, start - 60, start)])
                record = msgspec.structs.replace(record, times=wait + record.times)
            pace.note([record])
        return named(slowness(run.schedule, pace, since=0, settings={}, clocks=Clocks(), planned=None))

    assert after(100) == frozenset()
    assert after(100, 120) == {("script", None)}


def test_clocks_that_differ_by_seconds_change_nothing() -> None:
    run = SlowRun(make_schedule("1f1b", line(3), 8), EVEN, (0.03, 0.0001), ahead={0: 0.0, 1: 3.0, 2: -3.0})
    assert named(told(run)) == {("wire", 0)}
    off = Clocks({0: 0.0, 1: 3.01, 2: -2.99}, run.ahead and {worker: str(worker) for worker in run.ahead})
    facts = slowness(run.schedule, run.pace(STEPS, 0), since=0, settings={}, clocks=off, planned=None)
    assert named(facts) == {("wire", 0)}


def test_a_better_cut_is_suggested_with_its_simulated_gain_until_the_plan_has_it() -> None:
    run = SlowRun(make_schedule("1f1b", line(3), 8), (0.01, 0.03, 0.01), NEAR)
    (found,) = told(run, {"model": {"cut": [1, 4]}})["findings"]
    best = max(found["remedies"], key=lambda each: each["gain"])
    moved = [each["do"] for each in found["remedies"] if "model.cut = " in each["do"]]
    assert any(cut in moved[0] for cut in ("[2, 4] in place", "[1, 3] in place", "[2, 3] in place"))
    assert 0 < best["gain"] < 1
    evened = [each["do"] for each in told(run, {"model": {"stages": 3}})["findings"][0]["remedies"]]
    assert any('model.balance = "time"' in each for each in evened)
    by_time = [each["do"] for each in told(run, {"model": {"stages": 3, "balance": "time"}})["findings"][0]["remedies"]]
    assert by_time
    assert not any("balance" in each for each in by_time)


def test_fewer_bytes_are_suggested_for_a_narrow_link_alone_and_not_if_they_are_the_fewest() -> None:
    narrow = SlowRun(make_schedule("1f1b", line(2), 8), EVEN[:2], NEAR[:1], transfer=0.04)
    far = SlowRun(make_schedule("1f1b", line(2), 8), EVEN[:2], (0.06,))

    def does(run: SlowRun, settings: dict[str, dict[str, object]]) -> str:
        (found,) = told(run, settings)["findings"]
        assert (found["cause"], found["hop"]) == ("wire", [0, 1])
        return " ".join(each["do"] for each in found["remedies"])

    assert 'queues.codec = "bf16"' in does(narrow, {})
    assert 'queues.codec = "int8"' in does(narrow, {"queues": {"codec": "bf16"}})
    assert "codec" not in does(narrow, {"queues": {"codec": "int8"}})
    assert "codec" not in does(far, {})
    assert "schedule.window" in does(far, {})


def test_of_long_steps_only_few_are_looked_at_and_yet_snapshots_at_the_default_interval_are_named() -> None:
    schedule = make_schedule("1f1b", line(8), 64)
    run = SlowRun(schedule, (0.001,) * 8, (0.00001,) * 7, disk=3.0)
    facts = told(run, steps=50)
    first, last = facts["steps"]
    assert 4 <= last - first + 1 <= 8
    assert not first <= 40 <= last  # the step after a snapshot is not among them
    assert named(facts) == {("disk", None)}


def test_activations_that_come_from_files_are_a_cause_of_their_own_and_no_computing() -> None:
    """A stage that waited for its offloaded activations was told to compute for longer than others."""
    facts = told(three(offload=0.008))
    assert facts is not None
    (found,) = facts["findings"]
    assert found["cause"] == "offload"
    assert "activations that lie in files" in found["text"]
    assert "memory.offload" in found["remedies"][0]["do"]
    first = three(offload=0.008).records(3, 0)[0]
    sums, without = totals(first), totals(three().records(3, 0)[0])
    assert sums is not None
    assert without is not None
    assert sums.offload == pytest.approx(8 * 0.008, rel=0.1)
    assert sums.busy == pytest.approx(without.busy, rel=0.1)
