"""Displays of progress for a status, and the lines where stderr is no terminal."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from stageline.workers.cli.monitoring import progress
from stageline.workers.cli.monitoring.progress import (
    INTERVAL,
    Lines,
    News,
    Pace,
    finished_loss,
    progress_of,
    stage_activity,
)

LAUNCH = SimpleNamespace(
    steps=100,
    folder=Path("runs/tiny-1"),
    plan=SimpleNamespace(
        data=SimpleNamespace(batch_size=16), schedule=SimpleNamespace(accumulate=2), workers=[None, None]
    ),
    schedule=None,
)


def status(finished: int = 0, **changes: object) -> dict[str, object]:
    return {
        "phase": "running",
        "finished_floor": finished,
        "recollecting": False,
        "missing": [],
        "recovering": [],
        "damaged": [],
        "finished_loss": None,
        "evaluations": [],
        "best": None,
        "workers": [{"index": 0, "stages": [0, 2], "now": "0F6 of step 1"}, {"index": 1, "stages": [1]}],
        **changes,
    }


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(progress, "monotonic", lambda: clock.now)
    return clock


def test_the_rate_is_that_of_the_last_seconds(clock):
    pace = Pace(LAUNCH)
    for second in range(11):
        clock.now = float(second)
        pace.record(status(second if second < 7 else 6 + 2 * (second - 6)))
    assert pace.rate == "64 samples/s"


def test_steps_that_are_done_again_make_no_rate_below_zero(clock):
    pace = Pace(LAUNCH)
    for clock.now, finished in ((0.0, 9), (1.0, 0), (2.0, 3)):
        pace.record(status(finished))
        assert not pace.rate.startswith("-")
    assert pace.rate == "96 samples/s"


@pytest.mark.parametrize(
    ("changes", "phase"),
    [
        ({}, "running"),
        ({"phase": "waiting", "missing": [1]}, "waiting for worker 1"),
        ({"phase": "waiting", "missing": [0, 1, 3]}, "waiting for workers 0, 1 and 3"),
        ({"phase": "waiting"}, "waiting for the workers to connect their queues"),
        ({"listening": True}, "the broker was started again: waiting for the workers to reconnect"),
        ({"recollecting": True}, "the broker has no records of the run: asking the workers how far it is"),
        ({"finished": 100}, "evaluating"),
        ({"phase": "failed", "code": 75}, "interrupted"),
        ({"phase": "failed", "code": 1}, "failed"),
    ],
)
def test_the_phase_names_what_the_run_waits_for(changes, phase):
    assert Pace(LAUNCH).phase(status(**changes)) == phase


def test_a_loss_is_shown_unless_the_step_had_no_rows():
    assert finished_loss(status(finished_loss={"loss": 0.12345})) == "loss 0.1235"
    assert finished_loss(status(finished_loss={"loss": None})) == finished_loss(status()) == ""


def test_a_worker_of_two_stages_is_shown_at_the_one_that_it_computes():
    assert stage_activity(status(), 0) == (0, "0F6 of step 1")
    assert stage_activity(status(), 2) == (0, "")
    assert stage_activity(status(), 1) == (1, "starts")


def test_a_change_of_phase_is_printed_at_once_and_progress_every_few_seconds(capsys, clock):
    lines = Lines(LAUNCH, News("", lambda: None))
    lines(status())
    lines(status(1))
    assert capsys.readouterr().err == "stageline: running\n"
    clock.now = INTERVAL
    lines(status(2, finished_loss={"loss": 0.5}))
    printed = capsys.readouterr().err
    assert printed.startswith("stageline: step 2 of 100, loss 0.5, ")
    assert printed.endswith("samples/s, idle 0 %, 0 %\n")


def test_progress_that_does_not_change_is_printed_once(capsys, clock):
    """A full disk, or a worker that hung, filled a log with the same line every five seconds."""
    lines = Lines(LAUNCH, News("", lambda: None))
    for clock.now in (0.0, INTERVAL, 2 * INTERVAL, 3 * INTERVAL):
        lines(status(2))
    assert capsys.readouterr().err.count("step 2 of 100") == 1


def test_without_a_terminal_lines_are_printed(monkeypatch):
    monkeypatch.setattr("sys.stderr.isatty", lambda: False, raising=False)
    with progress_of(LAUNCH) as on_status:
        assert isinstance(on_status, Lines)
