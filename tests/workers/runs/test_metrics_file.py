"""The writer of a run's metrics: one line for each step, whatever is killed, and faults of the disk."""

import errno
import os
from pathlib import Path
from threading import Event
from typing import Any

import pytest

from stageline.pipeline import retry
from stageline.pipeline.retry import ResourceFault
from stageline.workers.runs import metrics as metrics_file
from stageline.workers.runs.metrics import (
    METRICS,
    MetricsFile,
    MetricsNotWritten,
    StepMetrics,
    evaluation_line,
    metrics_in,
)


def trained(step: int) -> StepMetrics:
    return StepMetrics(step=step, loss=0.5, learning_rates=(), rows=2, time=1.0)


def steps(folder: Path) -> list[int]:
    return [line.step for line in metrics_in(folder)]


def test_lines_are_on_the_disk_after_a_flush(tmp_path: Path):
    with MetricsFile(tmp_path, 0) as file:
        file.add(trained(0))
        file.add(trained(1))
        assert steps(tmp_path) == []
        file.flush()
        assert steps(tmp_path) == [0, 1]


def test_lines_are_on_the_disk_soon_and_at_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(metrics_file, "EVERY", 0.01)
    written = Event()
    monkeypatch.setattr(os, "fsync", lambda descriptor, plain=os.fsync: (plain(descriptor), written.set()))
    with MetricsFile(tmp_path, 0) as file:
        written.clear()  # of the empty file
        file.add(trained(0))
        assert written.wait(20)
        assert steps(tmp_path) == [0]
        file.add(trained(1))
    assert steps(tmp_path) == [0, 1]


def test_a_worker_that_begins_at_a_checkpoint_writes_each_later_step_once(tmp_path: Path):
    with MetricsFile(tmp_path, 0) as file:
        for step in range(7):
            file.add(trained(step))
    with (tmp_path / METRICS).open("ab") as whole:
        whole.write(b'{"kind":"step","step":7,"lo')  # as a kill leaves it
    with MetricsFile(tmp_path, 4) as file:
        for step in range(4, 9):
            file.add(trained(step))
    assert steps(tmp_path) == list(range(9))


def test_what_a_paused_predecessor_still_writes_is_not_in_the_file(tmp_path: Path):
    with MetricsFile(tmp_path, 0) as paused:
        for step in range(3):
            paused.add(trained(step))
        paused.flush()
        paused.add(trained(3))
        with MetricsFile(tmp_path, 2) as replacement:
            for step in range(2, 6):
                replacement.add(trained(step))
            replacement.flush()
            paused.flush()
            assert steps(tmp_path) == list(range(6))


def test_an_evaluation_that_is_repeated_after_a_restart_has_one_line(tmp_path: Path):
    with MetricsFile(tmp_path, 0) as file:
        for line in (trained(0), trained(1), evaluation_line(2, {"loss": 1.0}, 1.0, None)):
            file.add(line)
    with MetricsFile(tmp_path, 2) as file:
        file.add(evaluation_line(2, {"loss": 1.0}, 9.0, None))
        file.add(trained(2))
        file.add(evaluation_line(3, {"loss": 0.5}, 9.0, None))
    assert [(type(line).__name__[:4], line.step) for line in metrics_in(tmp_path)] == [
        ("Step", 0),
        ("Step", 1),
        ("Eval", 2),
        ("Step", 2),
        ("Eval", 3),
    ]


def test_a_write_that_fails_halfway_is_repeated_from_its_beginning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with MetricsFile(tmp_path, 0) as file:
        file.add(trained(0))
        file.flush()
        monkeypatch.setattr(os, "fsync", _full)
        file.add(trained(1))
        with pytest.raises(OSError, match="No space left"):
            file.flush()
        file.add(trained(2))
        monkeypatch.undo()
        file.flush()
        assert steps(tmp_path) == [0, 1, 2]


def test_a_full_disk_is_named_while_lines_wait_and_no_more_once_they_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(metrics_file, "EVERY", 0.01)
    told: list[ResourceFault | None] = []
    named, cleared = Event(), Event()

    def note(fault: ResourceFault | None) -> None:
        told.append(fault)
        (named if fault else cleared).set()

    with MetricsFile(tmp_path, 0, note) as file:
        monkeypatch.setattr(os, "fsync", _full)
        file.add(trained(0))
        assert named.wait(20)
        monkeypatch.undo()
        assert cleared.wait(20)
    assert told[0] is not None
    assert told[0].what == f"write {tmp_path / METRICS}"
    assert told[0].reason == "No space left on device"
    assert not told[0].blocks  # the loop goes on
    assert steps(tmp_path) == [0]


def test_a_disk_that_stays_full_ends_the_run_at_its_next_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(metrics_file, "EVERY", 0.01)
    monkeypatch.setattr(retry, "BOUND", 0.05)
    over = Event()
    with MetricsFile(tmp_path, 0, lambda fault: None if fault else over.set()) as file:
        monkeypatch.setattr(os, "fsync", _full)
        file.add(trained(0))
        assert over.wait(20)
        with pytest.raises(MetricsNotWritten, match=r"cannot write .*metrics.jsonl: No space left on device"):
            file.add(trained(1))
        with pytest.raises(MetricsNotWritten, match="No space left"):
            file.finish(lambda seconds: None)
        monkeypatch.undo()


def test_a_folder_that_cannot_be_written_to_is_named(tmp_path: Path):
    (tmp_path / "run").write_text("a file")
    with pytest.raises(MetricsNotWritten, match=r"cannot write .*run/metrics.jsonl: "):
        MetricsFile(tmp_path / "run", 0)


def _full(descriptor: Any) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
