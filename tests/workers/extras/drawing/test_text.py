"""Timetables as text, of planned and of measured schedules."""

from hypothesis import given
from hypothesis import strategies as st

from stageline.pipeline.program import Costs, Timed, check_schedule
from stageline.pipeline.schedule import Action, Kind, make_schedule
from stageline.workers.extras.drawing import draw_text
from support.shapes import line
from support.timetables import measured, planned


def picture(drawing: str) -> str:
    rows = [row.strip() for row in drawing.strip().splitlines()]
    return "\n".join(row[1:-1] for row in rows)


def test_a_planned_schedule_as_text() -> None:
    assert draw_text(planned()) == picture("""
        |          0              5              10    idle|
        |worker 0  F0 F1       B0███ F2 B1███    B2███  25%|
        |worker 1     F0 B0███ F1 B1███ F2 B2███        25%|
        |          F░░ forward   B██ backward|
    """)


def test_actions_of_one_length_have_one_width_wherever_they_begin() -> None:
    verdict = check_schedule(make_schedule("1f1b", line(2), 3), Costs.even(2, latency=0.5))
    assert draw_text(verdict.timed) == picture("""
        |          0              5              10          idle|
        |worker 0  F0 F1          B0███ F2 B1███       B2███  36%|
        |worker 1       F0 B0███ F1 B1███    F2 B2███         36%|
        |          F░░ forward   B██ backward|
    """)


def test_a_terminal_without_unicode_gets_ascii() -> None:
    assert draw_text(planned(), ascii_only=True) == picture("""
        |          0              5              10    idle|
        |worker 0  F0 F1       B0=== F2 B1===    B2===  25%|
        |worker 1     F0 B0=== F1 B1=== F2 B2===        25%|
        |          F-- forward   B== backward|
    """)


def test_a_narrower_terminal_loses_the_gaps_first() -> None:
    assert draw_text(planned(), width=40) == picture("""
        |          0                   10  idle|
        |worker 0  F0F1    B0██F2B1██  B2██ 25%|
        |worker 1    F0B0██F1B1██F2B2██     25%|
        |          F░░ forward   B██ backward|
    """)


def test_a_narrow_terminal_loses_the_labels() -> None:
    assert draw_text(planned(), width=30) == picture("""
        |          0           idle|
        |worker 0  ░░  ██░██ ██ 25%|
        |worker 1   ░██░██░██   25%|
        |          F░░ forward   B██ backward|
    """)


def test_a_measured_schedule_is_drawn_to_scale() -> None:
    timed = [
        Timed(0, Action(Kind.FORWARD, 0, 0), 50.000, 50.001),
        Timed(0, Action(Kind.UPDATE, 0), 50.007, 50.010),
        Timed(1, Action(Kind.FORWARD, 1, 0), 50.002, 50.006),
    ]
    assert draw_text(timed, seconds=True) == picture("""
        |          0 ms           5 ms           idle|
        |worker 0  F0                   U▄▄▄▄▄▄▄  60%|
        |worker 1        F0░░░░░░░░░              60%|
        |          F░░ forward   U▄▄ update|
    """)


@given(st.integers(0, 10**6), st.integers(30, 200))
def test_no_row_is_wider_than_the_terminal(seed: int, width: int) -> None:
    *rows, _legend = draw_text(measured(seed), width=width, seconds=True).splitlines()
    assert max(map(len, rows)) <= width
    assert len({len(row) for row in rows}) == 1


def test_a_timetable_without_actions_is_one_line_of_text() -> None:
    assert draw_text([]) == "no action took any time"
    assert draw_text([Timed(0, Action(Kind.UPDATE, 0), 3, 3)]) == "no action took any time"
