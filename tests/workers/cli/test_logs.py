"""Log lines, as they come to stderr."""

import re
import time
from datetime import datetime

import structlog

from stageline.workers.cli.output import log_to_stderr
from stageline.workers.control.kept_log import LOGGED
from stageline.workers.runs.logs import unstamped


def test_news_have_a_time_warnings_and_errors_a_prefix_and_the_traceback_comes_first(capsys):
    log_to_stderr()
    try:
        log = structlog.get_logger()
        log.info("assigned", worker=0, incarnation=1)
        log.warning("waiting", reason="no broker")
        try:
            raise ValueError("damaged")
        except ValueError as error:
            log.error("failed", reason=str(error), exc_info=error)
    finally:
        structlog.reset_defaults()
    first, second, *traceback, last = capsys.readouterr().err.splitlines()
    assert re.fullmatch(r"\d\d:\d\d:\d\d assigned: worker 0, incarnation 1", first)
    assert second == "stageline: warning: waiting: no broker"
    assert traceback[0].startswith("Traceback")
    assert last == "stageline: failed: damaged"


def test_text_from_elsewhere_neither_controls_the_terminal_nor_looks_like_another_event(capsys):
    log_to_stderr()
    try:
        structlog.get_logger().warning(
            "refused", reason="it is \x1b[2J\x9b31m\u202e\n00:00:00 assigned: forged", by="a\rb"
        )
    finally:
        structlog.reset_defaults()
    assert capsys.readouterr().err == (
        "stageline: warning: refused: it is \\x1b[2J\\x9b31m\\u202e\n    00:00:00 assigned: forged: by a\\x0db\n"
    )


def test_events_for_developers_are_not_shown(capsys):
    """A broker told of each connection of a process that knocked, every five seconds."""
    log_to_stderr()
    try:
        structlog.get_logger().debug("a connection was closed")
        structlog.get_logger().info("a step is done")
    finally:
        structlog.reset_defaults()
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith("a step is done")


def test_in_the_log_of_a_process_each_line_begins_with_its_whole_time_and_none_is_kept_with_a_traceback(capsys):
    """A merged log had warnings at the time of the line before them, hours too early."""
    log_to_stderr(to_file=True)
    try:
        log = structlog.get_logger()
        log.info("assigned", worker=0)
        try:
            raise ValueError("damaged")
        except ValueError as error:
            log.error("failed", reason=str(error), exc_info=error)
        kept = LOGGED.since(0).lines
    finally:
        structlog.reset_defaults()
        LOGGED.clear()
    first, traceback, *_, last = capsys.readouterr().err.splitlines()
    for line in (first, traceback, last):
        assert re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3}[+-]\d\d:\d\d ", line), line
    assert unstamped(first) == "assigned: worker 0"
    assert unstamped(traceback).startswith("Traceback")
    assert unstamped(last) == "stageline: failed: damaged"
    assert [(each.level, each.text) for each in kept] == [("info", "assigned: worker 0"), ("error", "failed: damaged")]


def test_lines_keep_their_distance_when_the_systems_clock_is_set(capsys, monkeypatch):
    """Offsets between machines are those of steady clocks: lines by the system's clock were moved by the wrong one."""
    log_to_stderr(to_file=True)
    try:
        log = structlog.get_logger()
        log.info("before")
        real = time.time
        monkeypatch.setattr(time, "time", lambda: real() + 3600)
        log.info("after")
        before, after = (each.time for each in LOGGED.since(0).lines)
    finally:
        structlog.reset_defaults()
        LOGGED.clear()
    assert 0 <= after - before < 1800
    first, second = (datetime.fromisoformat(line[:29]) for line in capsys.readouterr().err.splitlines())
    assert (second - first).total_seconds() < 1800
