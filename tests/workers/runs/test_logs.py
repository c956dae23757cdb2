"""Logs in the folder of a run, as they are read: each line with a time, in order, and again what was added."""

import os
from pathlib import Path

from stageline.workers.runs.logs import FileLine, LogFile, logs_in, stamped, unstamped

NOON = 1_700_049_600.0  # seconds since the epoch


def log(folder: Path, text: str, changed: float = NOON + 100) -> LogFile:
    path = folder / "worker-0.log"
    path.write_text(text)
    os.utime(path, (changed, changed))
    return LogFile(path)


def test_a_line_has_the_time_that_was_stamped_on_it_to_the_millisecond(tmp_path: Path) -> None:
    line = stamped(NOON + 0.25, "assigned: worker 0")
    assert unstamped(line) == "assigned: worker 0"
    assert list(log(tmp_path, f"{line}\n").lines()) == [FileLine(NOON + 0.25, True, "assigned: worker 0")]


def test_a_line_of_another_time_zone_is_at_the_same_moment(tmp_path: Path) -> None:
    (line,) = log(tmp_path, "2023-11-15 14:00:00.500+02:00 said\n").lines()
    assert line == FileLine(NOON + 0.5, True, "said")


def test_a_line_without_a_time_has_that_of_the_line_before_and_the_last_ones_that_of_the_files_change(tmp_path):
    text = f"loads\n{stamped(NOON, 'one')}\nprinted\n{stamped(NOON + 2, 'two')}\nTraceback\nValueError\n"
    found = [(each.time - NOON, each.exact, each.text) for each in log(tmp_path, text).lines()]
    assert found == [
        (0.0, False, "loads"),
        (0.0, True, "one"),
        (0.0, False, "printed"),
        (2.0, True, "two"),
        (100.0, False, "Traceback"),
        (100.0, False, "ValueError"),
    ]


def test_a_time_that_a_line_cannot_be_of_is_text_so_that_times_never_fall(tmp_path: Path) -> None:
    """User code prints dates of its data: one of 2030 would have moved all lines after it."""
    strange = ["2030-01-01 00:00:00 in the rows", "2001-01-01 00:00:00 too", "2026-13-41 99:00:00 no date"]
    text = "\n".join([stamped(NOON, "one"), *strange, stamped(NOON + 3, "two"), ""])
    found = list(log(tmp_path, text).lines())
    assert [each.text for each in found if not each.exact] == strange
    assert [each.time - NOON for each in found] == [0, 0, 0, 0, 3]


def test_what_was_added_is_read_once_and_a_line_without_an_end_when_it_has_one(tmp_path: Path) -> None:
    read = log(tmp_path, f"{stamped(NOON, 'one')}\n{stamped(NOON + 1, 'tw')}")
    assert [each.text for each in read.lines(whole=True)] == ["one"]
    assert list(read.lines(whole=True)) == []
    with read.path.open("a") as file:
        file.write("o\n")
    assert [each.text for each in read.lines(whole=True)] == ["two"]
    log(tmp_path, f"{stamped(NOON + 2, 'e')}\n")
    assert [each.text for each in read.lines()] == ["e"], "a file that was emptied is read from its beginning"


def test_the_newest_lines_of_a_long_file_are_read_alone_and_whole(tmp_path: Path) -> None:
    lines = [stamped(NOON + number, f"line {number}") for number in range(100)]
    read = log(tmp_path, "\n".join(lines) + "\n")
    read.skip_to(200)
    assert [each.text for each in read.lines()] == [f"line {number}" for number in range(95, 100)]


def test_bytes_that_are_no_text_and_a_line_without_end_are_read(tmp_path: Path) -> None:
    path = tmp_path / "worker-0.log"
    path.write_bytes(b"\xff\xfe" + b"x" * 200_000)
    found = list(LogFile(path).lines())
    assert sum(len(each.text) for each in found) == 200_002
    assert max(len(each.text) for each in found) <= 2**16


def test_records_of_keys_are_no_log_of_a_process(tmp_path: Path) -> None:
    for name in ("worker-0.log", "broker.log", "keys.log", "metrics.jsonl"):
        (tmp_path / name).touch()
    assert [path.name for path in logs_in(tmp_path)] == ["broker.log", "worker-0.log"]
