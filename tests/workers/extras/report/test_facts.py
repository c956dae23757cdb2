"""The data of a run's page: from the broker's answers to columns, tables and curves."""

import json
from pathlib import Path

import pytest

from stageline.broker.ledger.milestones import Milestones
from stageline.workers.extras.report.columns import TimetableColumns, thinned
from stageline.workers.extras.report.curves import MeasuredLosses, StepClock
from support.pictured_runs import PicturedRun

KEYS = {"run", "why", "curves", "timetable", "stores", "faults", "plan"}


@pytest.fixture(scope="module")
def pictured() -> PicturedRun:
    return PicturedRun(3, 4, 12)


def decoded(lane: dict, kinds: list[str]) -> list[tuple[str, int, float, float]]:
    """Kind, microbatch, start and end of the actions of a lane."""
    at, found = 0, []
    for start, took, kind, microbatch in zip(
        *(lane[name] for name in ("start", "took", "kind", "microbatch")), strict=True
    ):
        at += start
        found.append((kinds[kind], microbatch, at * 1e-6, (at + took) * 1e-6))
    return found


def test_the_page_has_its_sections_in_json_also_before_the_run_has_begun(pictured: PicturedRun) -> None:
    for found in (pictured.sections(), PicturedRun(2, 2, 0).sections()):
        assert set(found) == KEYS
        json.dumps(found, allow_nan=False)


def test_what_limits_the_run_is_what_why_answers(pictured: PicturedRun) -> None:
    answer = pictured.ask("why")
    assert pictured.sections()["why"] == {key: answer.get(key) for key in ("text", "action", "slow", "recovery")}
    assert "stage 1" in answer["slow"]["findings"][0]["text"]


def test_the_columns_of_a_timetable_are_the_actions_of_its_steps(pictured: PicturedRun) -> None:
    section = pictured.sections()["timetable"]
    numbers = [each["step"] for each in section["steps"]]
    assert numbers == list(range(4, 12))
    asked = pictured.ask("timetable", first="3", last="11")["steps"][1:]
    for worker, lane in enumerate(section["lanes"]):
        expected = [each for step in asked for each in step["actions"] if each["worker"] == worker]
        ran = decoded(lane["ran"], section["kinds"])
        assert [(kind, number) for kind, number, _, _ in ran] == [
            (each["kind"], -1 if each["kind"] == "U" else each["microbatch"]) for each in expected
        ]
        for (_, _, start, end), each in zip(ran, expected, strict=True):
            assert start == pytest.approx(each["start"] - section["origin"], abs=2e-6)
            assert end == pytest.approx(each["end"] - section["origin"], abs=3e-6)
    assert section["planned_seconds"] == max(each["end"] for each in asked[-1]["planned"])


def test_the_table_behind_the_timetable_adds_up_a_step(pictured: PicturedRun) -> None:
    section = pictured.sections()["timetable"]
    newest = section["steps"][-1]
    for row in section["summary"]:
        idle = sum(seconds for _, seconds in row["waits"])
        assert 0 < row["computed"] + idle <= 1.01 * (newest["end"] - newest["start"])
    assert max(section["summary"], key=lambda row: row["computed"])["worker"] == 1


def test_a_plan_is_drawn_above_the_steps_that_it_fits_and_overlaps_no_other() -> None:
    step = {
        "schedule": "1f1b",
        "idle": [],
        "planned": [{"kind": "F", "stage": 0, "microbatch": 0, "worker": 0, "start": 0.0, "end": 3.0}],
    }
    action = {"kind": "F", "stage": 0, "microbatch": 0, "worker": 0}
    steps = [
        {
            **step,
            "step": number,
            "start": at,
            "seconds": 4.0,
            "schedule": name,
            "actions": [{**action, "start": at, "end": at + 1}],
        }
        for number, (at, name) in enumerate(
            [(0.0, "gpipe"), (4.0, "1f1b"), (9.0, "1f1b"), (11.0, "1f1b"), (14.0, "1f1b")]
        )
    ]
    assert TimetableColumns.of(steps, {}).section()["planned_of"] == [1, 3, 4]


def test_steps_per_second_and_losses_lie_at_the_times_of_their_steps(pictured: PicturedRun) -> None:
    ends = dict(map(tuple, pictured.ask("course")["ends"]))
    curves = pictured.sections()["curves"]
    assert curves["rates"]["at"] == [ends[step] for step in range(1, 12)]
    assert curves["rates"]["value"] == [pytest.approx(1 / (ends[step] - ends[step - 1])) for step in range(1, 12)]
    kept = {int(step): loss for step, loss in pictured.ask("status")["losses"].items()}
    assert dict(zip(curves["losses"]["step"], curves["losses"]["value"], strict=True)) == kept
    assert curves["losses"]["at"] == [ends[step] for step in curves["losses"]["step"]]
    (first, *_) = curves["evaluations"]
    assert first["at"] == ends[first["step"] - 1]


def test_events_are_in_order_and_say_why(pictured: PicturedRun) -> None:
    events = pictured.sections()["curves"]["events"]
    assert [each["at"] for each in events] == sorted(each["at"] for each in events)
    assert {each["what"] for each in events} == {"checkpoint", "loss", "return", "evaluation"}
    (lost,) = [each["text"] for each in events if each["what"] == "loss"]
    assert lost == "worker 1 was killed by SIGKILL"


def test_a_loss_of_a_worker_has_the_time_of_its_return(pictured: PicturedRun) -> None:
    (loss,) = pictured.sections()["faults"]["losses"]
    assert loss["returned"] - loss["at"] == pytest.approx(0.07)
    other = PicturedRun(2, 2, 6)
    other.talk.core.run.milestones = Milestones(
        each for each in other.talk.core.run.milestones if each.what != "return"
    )
    assert other.sections()["faults"]["losses"][0]["returned"] is None


def test_times_between_known_steps_lie_between_their_ends() -> None:
    clock = StepClock(
        [[20, 30.0], [0, 10.0], [10, 20.0], [12, 15.0]]
    )  # step 12 has been repeated: its end is another's
    assert clock.ends == [(0, 10.0), (10, 20.0), (20, 30.0)]
    assert clock.rates() == [1.0, 1.0]
    assert [clock.end_of(step) for step in (0, 5, 10, 12, 20)] == [10.0, 15.0, 20.0, 22.0, 30.0]
    assert (clock.end_of(-1), clock.end_of(21)) == (None, None)
    assert StepClock([]).end_of(0) is None


def test_thinned_curves_keep_every_peak_and_both_ends() -> None:
    points = [(step, 1.0 + step % 7) for step in range(10_000)]
    points[4321], points[777] = (4321, 99.0), (777, -99.0)
    points[5000] = (5000, None)
    found = thinned(points, 500)
    assert len(found) <= 502
    assert {points[0], points[-1], points[4321], points[777]} <= set(found)
    assert [step for step, _ in found] == sorted(step for step, _ in found)
    assert thinned(points[:500], 500) == points[:500]
    assert len(thinned([(step, None) for step in range(1000)], 100)) <= 102


def test_losses_of_every_step_are_read_from_the_folder_as_they_are_written(tmp_path: Path) -> None:
    measured, file = MeasuredLosses(tmp_path), tmp_path / "metrics.jsonl"
    assert measured.points({"3": 0.5, "12": 0.25}) == [(3, 0.5), (12, 0.25)]
    line = '{"kind":"step","step":%d,"loss":%s,"time":1.0}\n'
    file.write_text(line % (0, "2.5") + line % (1, "null"))
    assert measured.points({}) == [(0, 2.5), (1, None)]
    with file.open("a") as opened:
        opened.writelines(line % (step, step) for step in range(2, 9000))
    assert len(measured.points({})) <= 1502
    assert measured.points({})[-1] == (8999, 8999)


def test_the_plan_is_that_of_the_folder_without_passwords(pictured: PicturedRun, tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text('{"queues": {"url": "redis://me:secret@host/0"}, "run": {"steps": 5}}')
    plan = dict(pictured.sections(tmp_path)["plan"]["plan"])
    assert plan["run.steps"] == "5"
    assert "secret" not in plan["queues.url"]
    assert dict(pictured.sections()["plan"]["plan"])["plan.stages"] == "3"
    (tmp_path / "plan.json").write_text("{")
    (tmp_path / "process.json").write_text("{")
    assert dict(pictured.sections(tmp_path)["plan"]["plan"])["plan.stages"] == "3"
