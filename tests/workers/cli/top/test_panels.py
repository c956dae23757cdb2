"""The panels of `top` as text: paces, bars, and what is said when facts are lacking."""

from typing import Any

import pytest

from stageline.workers.cli.top.facts import Glance, PaceCourse, bars
from stageline.workers.cli.top.panels import PARTS, RunPanels, sparkline, stacked
from support.conversation import Conversation
from support.top_facts import answers, idle, ran, step

SECONDS = pytest.approx


def test_a_pace_is_the_mean_over_some_seconds_and_over_three_steps_of_a_slow_run() -> None:
    pace = PaceCourse()
    for second in range(20):
        pace.note(float(second), 2 * second, 2.0)
    assert set(pace.rates) == {2.0}
    slow = PaceCourse()
    for second in range(100):  # a step every ten seconds
        slow.note(float(second), second // 10, 0.1)
    assert list(slow.rates)[-1] == SECONDS(0.1, rel=0.05)
    assert min(list(slow.rates)[40:]) > 0.05


def test_no_pace_is_below_nought_when_a_run_goes_back_to_a_checkpoint() -> None:
    pace = PaceCourse()
    pace.note(0.0, 10, 1.0), pace.note(1.0, 4, 1.0)
    assert list(pace.rates) == [0.0]


def test_a_bar_has_the_seconds_of_each_cause_and_all_of_the_step() -> None:
    """Worker 0 draws rows for 1 s of an action of 3 s, waits 2 s for the disk, 1 s for messages, then to the end."""
    actions = [ran(0, 10.0, 13.0), ran(0, 16.0, 18.0), ran(1, 12.0, 20.0)]
    waits = [idle(0, "data", 10.0, 11.0), idle(0, "disk", 13.0, 15.0), idle(0, "wire", 15.0, 16.0)]
    found = bars([step(3, actions, [*waits, idle(1, "schedule", 10.0, 12.0)])])
    assert found[0] == {"compute": 4.0, "wait": 3.0, "data": 1.0, "disk": 2.0}
    assert found[1] == {"compute": 8.0, "wait": 2.0, "data": 0.0, "disk": 0.0}


@pytest.mark.parametrize("width", [4, 22, 40, 61])
@pytest.mark.parametrize(
    "bar",
    [
        {"compute": 1.0, "wait": 0.0, "data": 0.0, "disk": 0.0},
        {"compute": 1.0, "wait": 1.0, "data": 1.0, "disk": 1.0},
        {"compute": 1000.0, "wait": 3.0, "data": 2.0, "disk": 2.0},
        {"compute": 0.1, "wait": 0.333, "data": 5.0, "disk": 0.333},
    ],
)
def test_a_bar_fills_its_columns_and_shows_each_part_that_is_there(bar: dict[str, float], width: int) -> None:
    text = stacked(bar, width).plain
    assert len(text) == width
    assert {sign for name, (sign, _, _) in PARTS.items() if bar[name]} == set(text)
    assert stacked({}, width).plain == " " * width


def test_a_sparkline_has_the_newest_values_at_its_right_end() -> None:
    assert sparkline([0.0, 1.0, 2.0], 5) == "  ▁▄█" or sparkline([0.0, 1.0, 2.0], 5) == "  ▁▅█"
    assert sparkline([1.0] * 50 + [0.0], 4) == "███▁"
    assert sparkline([], 3) == "   "
    assert sparkline([0.0, 0.0], 2) == "▁▁"


@pytest.fixture
def talk() -> Conversation:
    talk = Conversation()
    talk.join(0), talk.join(1)
    return talk


def noted(talk: Conversation, width: int = 80, **more: Any) -> RunPanels:
    panels = RunPanels(width)
    panels.note(Glance(0.0, answers(talk), {}, **more))
    return panels


def test_no_line_of_the_head_is_wider_than_the_terminal_and_trouble_has_its_line(talk: Conversation) -> None:
    panels = noted(talk, trouble="no broker answered at ipc://x within 3 s. " * 4)
    lines = panels.head().plain.splitlines()
    assert len(lines) > 3
    assert max(map(len, lines)) <= 80
    assert "no broker answered" in lines[3]
    assert talk.core.run.id in lines[0]


def test_a_look_without_an_answer_leaves_what_was_known_and_adds_the_trouble(talk: Conversation) -> None:
    panels = noted(talk)
    before = panels.workers()
    panels.note(Glance(1.0, {}, {}, "the broker is gone"))
    assert [question for question, _ in panels.workers().rows] == [question for question, _ in before.rows]
    assert "the broker is gone" in panels.head().plain


def test_a_question_that_is_refused_is_told_in_its_panel(talk: Conversation) -> None:
    panels = RunPanels()
    panels.note(Glance(0.0, {"status": talk.status()}, {"queues": "no right to inspect", "timetable": "no times"}))
    assert panels.queues(76).note == "no right to inspect"
    assert panels.timetable(76).plain == "no times"
    assert "not known yet" in panels.head().plain


def test_a_worker_that_is_missing_has_a_row_and_a_lost_one_is_in_the_head(talk: Conversation) -> None:
    facts = dict(talk.status())
    facts["workers"] = [{**facts["workers"][0], "standing": "lost"}, {"index": 1, "stages": [1], "standing": "missing"}]
    panels = RunPanels()
    panels.note(Glance(0.0, {"status": facts}, {}))
    assert "lost: 0" in panels.head().plain
    assert [cells[2].plain for _, cells in panels.workers().rows] == ["lost", "missing"]


def test_before_the_first_answer_it_is_said_that_the_broker_is_asked() -> None:
    panels = RunPanels()
    assert "asking" in panels.head().plain
    assert not panels.workers().rows
    panels.note(Glance(0.0, {}, {}, "no broker answers"))
    assert panels.head().plain == "no broker answers"
