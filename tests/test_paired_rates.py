"""Two runs are compared while both are there, and only one of them goes on at a time."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
import pytest

from support.paths import ROOT

# Writes when each of its steps ended, from a process in a session of its own, as workers are.
_RUN = """
import os, sys, time
if os.fork():
    os.wait()
else:
    os.setsid()
    with open(sys.argv[1], "a", buffering=1) as file:
        for _ in range(int(sys.argv[2])):
            time.sleep(0.001)
            print(time.time(), file=file)
"""
FOREVER = 10**9


@pytest.fixture
def paired(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(ROOT)
    from benchmarks.measuring import paired

    return paired


class Runs:
    """Runs that are ended with the test."""

    def __init__(self, paired: Any, folder: Path) -> None:
        self._paired = paired
        self._folder = folder
        self.started: list[Any] = []

    def start(self, steps: int) -> Any:
        """Returns a run once it has ended a step."""
        ends = self._folder / str(len(self.started))
        ends.touch()
        process = subprocess.Popen([sys.executable, "-c", _RUN, ends, str(steps)], start_new_session=True)
        run = self._paired.StartedRun(process.pid, lambda: [float(each) for each in ends.read_text().split("\n")[:-1]])
        self.started.append((run, process))
        while not run.ends():
            assert run.is_alive or run.ends()  # it may have ended with its step in between
        return run

    def end(self) -> None:
        """Nothing is left, also not of what is in sessions of its own."""
        for run, process in self.started:
            every = [each for each in psutil.Process(run.group).children(recursive=True) if run.is_alive]
            run.send(signal.SIGKILL)
            process.wait()
            assert psutil.wait_procs(every, timeout=60)[1] == []


@pytest.fixture
def runs(paired: Any, tmp_path: Path) -> Iterator[Runs]:
    found = Runs(paired, tmp_path)
    yield found
    found.end()


def is_stopped(run: Any) -> bool:
    """True once no process of the run goes on."""
    leader = psutil.Process(run.group)
    return {each.status() for each in (leader, *leader.children(recursive=True))} == {"stopped"}


def test_while_one_run_goes_on_all_processes_of_the_other_are_stopped(
    paired: Any, runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process that computes is not in the group of the one that was started: it is found by its parents."""
    both = [runs.start(FOREVER), runs.start(FOREVER)]
    seen: list[list[bool]] = []

    def look(seconds: float) -> None:
        while sum(stopped := [is_stopped(run) for run in both]) != 1:
            pass
        seen.append(stopped)

    monkeypatch.setattr(paired.time, "sleep", look)
    monkeypatch.setattr(paired, "rates_in", lambda ends, windows: (2.0,) * len(windows))
    paired.take_turns(*both, windows=3)
    assert seen == ([[False, True]] * 2 + [[True, False]] * 2) * 3
    while not all(map(is_stopped, both)):
        pass


def test_rates_are_of_the_steps_within_each_window(paired: Any, runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    both = [runs.start(FOREVER), runs.start(FOREVER)]

    def await_steps(seconds: float) -> None:
        """Returns once the run that goes on has ended more steps."""
        counts = [len(run.ends()) + 10 for run in both]
        while not any(len(run.ends()) >= count for run, count in zip(both, counts, strict=True)):
            pass

    monkeypatch.setattr(paired.time, "sleep", await_steps)
    found = paired.take_turns(*both, windows=3)
    assert [len(found.first), len(found.second)] == [3, 3]
    assert all(0 < rate <= 1000 for rate in (*found.first, *found.second))  # a step takes a millisecond at least
    expected = [mine * 2 / sum(around) for mine, around in zip(found.second, pairwise(found.first), strict=False)]
    assert found.ratios.rounds == pytest.approx(expected)
    assert f"{found.ratios.middle:.3f}" in str(found)


def test_a_run_that_ends_before_its_windows_is_named(paired: Any, runs: Runs) -> None:
    with pytest.raises(paired.TooFewWindows, match="ended in its window"):
        paired.take_turns(runs.start(1), runs.start(FOREVER), windows=10_000, seconds=0.01)


def test_windows_without_steps_are_not_compared(paired: Any) -> None:
    with pytest.raises(paired.TooFewWindows, match="1 windows had enough steps"):
        paired.PairedRates.of([2.0, 4.0, 0.0], [3.0, 6.0, 1.0])


def test_ends_of_steps_are_read_from_the_metrics_of_a_run(paired: Any, tmp_path: Path) -> None:
    folder = tmp_path / "digits-1"
    folder.mkdir()
    lines = ['{"kind":"step","step":0,"loss":2.3,"time":17.5}', '{"kind":"evaluation","step":1,"loss":2.4,"time":18.0}']
    (folder / "metrics.jsonl").write_text("\n".join([*lines, '{"kind":"step","step":1,"loss":2.2,"time":18.5}', ""]))
    assert paired.step_ends(tmp_path) == [17.5, 18.5]
    assert paired.step_ends(tmp_path / os.devnull) == []
