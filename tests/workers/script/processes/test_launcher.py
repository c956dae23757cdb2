"""Reports of a launcher to the script."""

import os
import tempfile
from collections.abc import Iterator

import pytest

from stageline.workers.runs.folder import LaunchOutcome
from stageline.workers.script.processes.launcher_report import LauncherReport, LaunchStarted


@pytest.fixture
def report() -> Iterator[LauncherReport]:
    with tempfile.TemporaryFile() as file:
        yield LauncherReport(file.fileno())


def test_each_message_is_read_once(report):
    started = LaunchStarted("ipc://sockets/broker", "sockets")
    ended = LaunchOutcome(75, "stopped\nby hand", {"steps": 4})
    assert list(report.read()) == []
    report.write(started)
    assert list(report.read()) == [started]
    report.write(ended)
    assert [*report.read(), *report.read()] == [ended]


def test_a_message_is_read_once_all_of_it_is_there(report):
    """A report of a run with many losses is long: it may be looked at while it is written."""
    os.write(report.fd, b'{"type":"LaunchOutcome","code":0,')
    assert list(report.read()) == []
    os.write(report.fd, b'"reason":"","facts":{}}\n')
    assert list(report.read()) == [LaunchOutcome(0, "", {})]
