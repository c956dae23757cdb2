"""Tables and amounts, as they are printed."""

import sys
from pathlib import Path

import pytest

from stageline.workers.cli.output import counted, duration, share, show, size, summary
from stageline.workers.runs.folder import Result


def test_columns_are_aligned_and_numbers_flush_right(capsys):
    show("queues", ("queue", "ready"), [("forward-1", 7), ("backward-0", 12)])
    assert capsys.readouterr().out == "queues\nqueue       ready\nforward-1       7\nbackward-0     12\n"


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.35, "350 ms"), (4.2, "4.2 s"), (200, "3 min 20 s"), (7500, "2 h 5 min")]
)
def test_a_duration_has_the_unit_that_fits(seconds, text):
    assert duration(seconds) == text


@pytest.mark.parametrize(("count", "text"), [(0, "0 B"), (999, "999 B"), (49_200, "49.2 kB"), (2.5e15, "2.5e+03 TB")])
def test_a_size_has_the_unit_that_fits(count, text):
    assert size(count) == text


def test_shares_and_counts_are_written_out():
    assert (share(0.123), counted(1, "worker"), counted(2, "worker")) == ("12 %", "1 worker", "2 workers")
    assert counted(3, "microbatch", "microbatches") == "3 microbatches"


def test_a_summary_has_a_line_for_each_metric_also_for_one_that_is_no_number():
    result = Result(
        run="small",
        steps=6,
        microbatches=3,
        loss=None,
        losses={},
        metrics={"accuracy": 0.5, "ratio": "nan"},
        weights_sha256="ab",
        seconds=1.5,
    )
    rows = dict(line.split(maxsplit=1) for line in summary(result, Path("runs/small")).splitlines())
    assert rows["loss"] == "no rows in the last step"
    assert (rows["accuracy"], rows["ratio"], rows["time"]) == ("0.5", "nan", "1.5 s")


HOSTILE = "worker\x1b]0;owned\x07\n\u202e[red]x[/red]"
SHOWN = "worker\\x1b]0;owned\\x07\\n\\u202e[red]x[/red]"


@pytest.mark.parametrize("terminal", [False, True])
def test_a_cell_from_elsewhere_stays_a_cell(terminal: bool, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: terminal, raising=False)
    show("workers", ["name", "is"], [[HOSTILE, "present"]])
    printed = capsys.readouterr().out
    assert SHOWN in printed
    assert "\x07" not in printed
    assert "\u202e" not in printed
