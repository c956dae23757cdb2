"""The clock that a run's times are read from: a step of the system's clock does not move it."""

import re

import pytest

from stageline.pipeline.process.steady_clock import STEADY, SteadyClock
from support.paths import ROOT


class SystemClock:
    """A machine, whose clock is set; both of its clocks are read."""

    def __init__(self) -> None:
        self.passed, self.epoch = 50.0, 1000.0

    def system(self) -> float:
        return self.epoch + self.passed

    def monotonic(self) -> float:
        return self.passed


@pytest.mark.parametrize("seconds", [3.0, -3.0, 3600.0])
def test_a_step_of_the_systems_clock_does_not_move_it_and_is_known(seconds: float) -> None:
    machine = SystemClock()
    clock = SteadyClock(machine.system, machine.monotonic)
    begun = clock.time()
    assert begun == machine.system()
    machine.passed += 2.0
    machine.epoch += seconds
    assert clock.time() - begun == 2.0
    assert clock.behind() == pytest.approx(seconds)


def test_it_is_near_the_systems_clock_unless_that_is_set() -> None:
    assert abs(STEADY.behind()) < 60


READS_THE_SYSTEMS_CLOCK = {"entrance.py", "client.py"}  # for lines of a log, and for the first number of messages


def test_no_process_of_a_run_compares_times_of_the_systems_clock() -> None:
    """A broker whose clock was set back by an hour, and then asked to stop, found that all workers were silent."""
    rooms = ("workers/runtime", "workers/control", "workers/process", "workers/script/calls")
    files = [file for room in rooms for file in (ROOT / room).glob("*.py")]
    reads = {file.name for file in files if re.search(r"from time import .*\btime\b|\btime\.time\b", file.read_text())}
    assert reads == READS_THE_SYSTEMS_CLOCK
