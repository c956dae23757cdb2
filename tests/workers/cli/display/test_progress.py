"""What the progress displays show of a status, and the lines where stderr is no terminal."""

from types import SimpleNamespace

import pytest

from stageline.workers.cli.display import progress
from stageline.workers.cli.display.progress import INTERVAL, Lines, Pace, finished_loss, progress_of, stage_activity

LAUNCH = SimpleNamespace(
    steps=100,
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


def test_a_round_of_evaluation_is_told_once(clock):
    pace = Pace(LAUNCH)
    found = {"step": 3, "rows": 8, "loss": 0.25, "metrics": {"accuracy": 0.5, "lost": "nan"}}
    later = {**found, "step": 6}
    best = {"step": 3, "metric": "loss", "value": 0.25, "since": 0}
    told = "evaluation after step 3: loss 0.25, accuracy 0.5, lost nan, the best so far"
    assert pace.record(status(evaluations=[found], best=best)) == [told]
    assert pace.record(status(evaluations=[found], best=best)) == []
    assert pace.record(status(evaluations=[found, later], best=best)) == [
        "evaluation after step 6: loss 0.25, accuracy 0.5, lost nan"
    ]


def test_rounds_of_evaluation_between_two_statuses_are_all_told(clock):
    found = {"step": 3, "rows": 8, "loss": 0.25, "metrics": {}}
    pace, later = Pace(LAUNCH), {**found, "step": 6, "loss": 0.5}
    assert not pace.record(status())
    told = pace.record(status(evaluations=[found, later], best=None))
    assert told == ["evaluation after step 3: loss 0.25", "evaluation after step 6: loss 0.5"]


def test_of_the_rounds_before_a_run_was_resumed_the_last_is_told(clock):
    found = {"step": 3, "rows": 8, "loss": 0.25, "metrics": {}}
    told = Pace(LAUNCH).record(status(evaluations=[{**found, "step": 1}, found], best=None))
    assert told == ["evaluation after step 3: loss 0.25"]


def test_a_damage_is_reported_once(clock):
    pace = Pace(LAUNCH)
    assert pace.record(status(damaged=["a"])) == ["a"]
    assert pace.record(status(damaged=["a", "b"])) == ["b"]
    assert pace.record(status(damaged=["a", "b"])) == []


@pytest.mark.parametrize(
    ("changes", "phase"),
    [
        ({}, "running"),
        ({"phase": "waiting", "missing": [1]}, "waiting for worker 1"),
        ({"phase": "waiting", "missing": [0, 1, 3]}, "waiting for workers 0, 1 and 3"),
        ({"phase": "waiting"}, "waiting for the workers to connect their queues"),
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
    lines = Lines(LAUNCH)
    lines(status())
    lines(status(1))
    assert capsys.readouterr().err == "stageline: running\n"
    clock.now = INTERVAL
    lines(status(2, finished_loss={"loss": 0.5}))
    printed = capsys.readouterr().err
    assert printed.startswith("stageline: step 2 of 100, loss 0.5, ")
    assert printed.endswith("samples/s, idle 0 %, 0 %\n")


def test_without_a_terminal_lines_are_printed(monkeypatch):
    monkeypatch.setattr("sys.stderr.isatty", lambda: False, raising=False)
    with progress_of(LAUNCH) as on_status:
        assert isinstance(on_status, Lines)
