"""The end of a log in a bundle: what stageline has written, and nothing that the user's code has printed."""

from pathlib import Path

from stageline.workers.cli.bundle_archive import LONGEST, end_of
from stageline.workers.runs.logs import own_text, stamped

NOON = 1_700_049_600.0  # seconds since the epoch

LOG = """\
10:15:00 assigned: worker 0, incarnation 1
the first row is Anna Karenina
42, Vronsky
10:15:01 an event
    which goes on
and this is a print
stageline: warning: the disk is slow
Traceback (most recent call last):
  File "/home/anna/data.py", line 9, in batches
    rows = load("hunter2")
           ^^^^^^^^^^^^^^^
ValueError: no rows
stageline: stage 0 failed
"""


def test_lines_of_the_users_code_are_counted_and_those_of_stageline_and_of_errors_stay(tmp_path: Path) -> None:
    (tmp_path / "worker-0.log").write_text(LOG)
    assert end_of(tmp_path / "worker-0.log", own_text).splitlines() == [
        "10:15:00 assigned: worker 0, incarnation 1",
        "[2 lines of other origin]",
        "10:15:01 an event",
        "    which goes on",
        "[1 lines of other origin]",
        "stageline: warning: the disk is slow",
        "Traceback (most recent call last):",
        '  File "/home/anna/data.py", line 9, in batches',
        "[2 lines of other origin]",
        "ValueError: no rows",
        "stageline: stage 0 failed",
    ]


def test_lines_with_the_time_of_a_runs_log_stay_and_no_line_of_code_of_a_traceback_that_has_one(tmp_path: Path) -> None:
    """A bundle had none of them: all were counted as lines of other origin."""
    kept = [
        stamped(NOON, "assigned: this process is worker 0"),
        "    which goes on",
        stamped(NOON + 1, "stageline: warning: the disk is slow"),
        stamped(NOON + 2, "Traceback (most recent call last):"),
        '  File "/home/anna/data.py", line 9, in batches',
    ]
    end = ["ValueError: no rows", stamped(NOON + 2, "stageline: stage 0 failed: no rows")]
    rows = ["2023-11-15 12:00:00,250 Anna Karenina", "2023-11-15, Vronsky"]
    text = "\n".join([*rows, *kept, '    rows = load("hunter2")', *end])
    (tmp_path / "worker-0.log").write_text(text)
    other = ["[2 lines of other origin]", *kept, "[1 lines of other origin]", *end]
    assert end_of(tmp_path / "worker-0.log", own_text).splitlines() == other


def test_of_a_long_log_the_end_is_taken_whatever_its_bytes_are(tmp_path: Path) -> None:
    (tmp_path / "a.log").write_bytes(b"\xff\xfe\n" * LONGEST + b"10:15:00 the end\n")
    first, *_, last = end_of(tmp_path / "a.log", own_text).splitlines()
    assert first.endswith("bytes before]")
    assert last == "10:15:00 the end"
