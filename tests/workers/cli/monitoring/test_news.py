"""Each event of a run is told once."""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from stageline.workers.cli.monitoring import progress as news_module
from stageline.workers.cli.monitoring.progress import STALL, News
from stageline.workers.cli.monitoring.stalls import Stall, StallCommand

LOST = {"index": 1, "pid": 7, "stages": [1], "since": 0.1, "how": "was killed by SIGKILL", "left": 60, "given": False}
SILENT = {
    "text": "stage 0 waits for stage 1, which was silent for 5.2 s",
    "action": "check process 7 on desk",
    "root": {"cause": "silent", "worker": {"index": 1}},
}


def status(finished: int = 0, **changes: object) -> dict[str, object]:
    return {
        "phase": "running",
        "finished_floor": finished,
        "checkpoint": 0,
        "damaged": [],
        "recovering": [],
        "evaluations": [],
        "best": None,
        "fault": "",
        "workers": [{"index": 0, "pid": 70}, {"index": 1, "pid": 71}],
        **changes,
    }


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(news_module, "monotonic", lambda: clock.now)
    return clock


def lines_of(news: News, facts: dict[str, object]) -> list[str]:
    return list(news.lines(facts))


def test_a_standstill_is_told_once_with_its_cause_and_what_to_do_and_so_is_its_end(clock):
    """A worker that hung, or was paused, showed as "0 samples/s" alone."""
    news = News("", lambda: SILENT)
    told = []
    for clock.now, finished in ((0.0, 3), (1.0, 4), (STALL, 4), (STALL + 2, 4), (3 * STALL, 4), (4 * STALL, 5)):
        told.append(lines_of(news, status(finished)))
    (cause,) = told[3]
    assert all(part in cause for part in (SILENT["text"], SILENT["action"]))
    (end,) = told[5]
    assert "19 s" in end
    assert told[:3] == [[], [], []]
    assert told[4] == []


def test_another_cause_of_the_same_standstill_is_told_too(clock):
    answers = iter([SILENT, {**SILENT, "root": {"cause": "missing", "worker": {"index": 1}}, "text": "it is missing"}])
    news = News("", lambda: next(answers))
    told = []
    for clock.now in (0.0, STALL, 2 * STALL):
        told += lines_of(news, status(4))
    assert [SILENT["text"] in line for line in told] == [True, False]


class NotedStalls(StallCommand):
    """Notes the stalls at which a command would be started."""

    def __init__(self) -> None:
        super().__init__((), Path())
        self.stalls: list[Stall] = []

    def start(self, stall: Stall, now: float) -> Iterator[str]:
        self.stalls.append(stall)
        yield "started"


def test_the_command_is_started_once_for_each_standstill(clock):
    causes = iter(["silent", "missing", "silent"])
    command = NotedStalls()
    news = News("", lambda: {**SILENT, "root": {"cause": next(causes), "worker": {"index": 1}}}, command)
    told = []
    for clock.now, finished in ((0.0, 4), (STALL, 4), (2 * STALL, 4), (3 * STALL, 5), (30 * STALL, 5)):
        told.append(lines_of(news, status(finished)))
    assert [(each.cause, each.step) for each in command.stalls] == [("silent", 4), ("silent", 5)]
    assert ["started" in lines for lines in told] == [False, True, False, False, True]


def test_a_slow_down_is_told_once_a_minute_of_steps_has_no_pause(clock):
    """After the replacement of a worker, the last minute says nothing of the pace."""
    command = NotedStalls()
    news = News("", lambda: {"slow": None}, command)
    pace = {"last_minute": 1.0, "best": 10.0}
    lines_of(news, status(3, recovering=[LOST]))
    for step in range(4, 64):
        clock.now = float(step)
        lines_of(news, status(step, pace=pace))
    assert command.stalls == []
    for step in range(64, 68):
        clock.now = float(step)
        lines_of(news, status(step, pace=pace))
    assert [each.kind for each in command.stalls] == ["slow"]


@pytest.mark.parametrize("cause", ["computing", "resting", "script"])
def test_a_run_that_makes_progress_is_not_said_to_stand_still(clock, cause):
    news = News("", lambda: {**SILENT, "root": {"cause": cause, "worker": {"index": 1}}})
    for clock.now in (0.0, STALL, 2 * STALL):
        assert lines_of(news, status(4)) == []


def test_long_steps_are_no_standstill(clock):
    news = News("", lambda: SILENT)
    for step in range(10):
        clock.now = step * 4 * STALL
        assert lines_of(news, status(step)) == []
    clock.now += 8 * STALL
    assert lines_of(news, status(9)) == []


@pytest.mark.parametrize("known", [{"recovering": [LOST]}, {"fault": "cannot keep its records"}, {"phase": "waiting"}])
def test_a_wait_whose_cause_is_told_otherwise_is_not_told_again(clock, known):
    news = News("", lambda: SILENT)
    lines_of(news, status(4, **known))
    for clock.now in (STALL, 2 * STALL):
        assert lines_of(news, status(4, **known)) == []


def test_without_an_answer_of_the_broker_nothing_is_told(clock):
    news = News("", lambda: None)
    for clock.now in (0.0, STALL, 2 * STALL):
        assert lines_of(news, status(4)) == []


def test_a_lost_worker_and_its_replacement_are_told(clock):
    news = News("", lambda: None)
    told = [
        lines_of(news, status(9)),
        lines_of(news, status(4, recovering=[LOST], checkpoint=4)),
        lines_of(news, status(4)),
    ]
    ((loss,), (again,)) = told[1:]
    assert "worker 1 (stage 1) was killed by SIGKILL" in loss
    assert "step 4" in loss
    assert "5 steps" in loss
    assert "process 71" in again


def test_a_round_of_evaluation_is_told_once():
    news = News("", lambda: None)
    found = {"step": 3, "rows": 8, "loss": 0.25, "metrics": {"accuracy": 0.5, "lost": "nan"}}
    later = {**found, "step": 6}
    best = {"step": 3, "metric": "loss", "value": 0.25, "since": 0}
    told = "evaluation after step 3: loss 0.25, accuracy 0.5, lost nan, the best so far"
    assert lines_of(news, status(evaluations=[found], best=best)) == [told]
    assert lines_of(news, status(evaluations=[found], best=best)) == []
    assert lines_of(news, status(evaluations=[found, later], best=best)) == [
        "evaluation after step 6: loss 0.25, accuracy 0.5, lost nan"
    ]


def test_rounds_of_evaluation_between_two_statuses_are_all_told():
    found = {"step": 3, "rows": 8, "loss": 0.25, "metrics": {}}
    news, later = News("", lambda: None), {**found, "step": 6, "loss": 0.5}
    assert not lines_of(news, status())
    told = lines_of(news, status(evaluations=[found, later], best=None))
    assert told == ["evaluation after step 3: loss 0.25", "evaluation after step 6: loss 0.5"]


def test_of_the_rounds_before_a_run_was_resumed_the_last_is_told():
    found = {"step": 3, "rows": 8, "loss": 0.25, "metrics": {}}
    told = lines_of(News("", lambda: None), status(evaluations=[{**found, "step": 1}, found], best=None))
    assert told == ["evaluation after step 3: loss 0.25"]


def test_a_damage_is_reported_once():
    news = News("", lambda: None)
    assert lines_of(news, status(damaged=["a"])) == ["a"]
    assert lines_of(news, status(damaged=["a", "b"])) == ["b"]
    assert lines_of(news, status(damaged=["a", "b"])) == []
