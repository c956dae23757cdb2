"""A script's evaluations are there when its run goes on."""

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from stageline.workers.runs.metrics import EVALUATIONS, metrics_in
from stageline.workers.script import fitting as evaluation_log
from stageline.workers.script.fitting import EvaluationLog


def noted(folder: Path, *steps: int, fit: int | None = 1) -> None:
    record = EvaluationLog(folder, min(steps))
    for step in steps:
        record.note(step, {"loss": 1 / step, "accuracy": None}, fit)


@pytest.mark.parametrize("position", range(5))
def test_a_run_that_goes_on_has_what_was_evaluated_until_then(tmp_path: Path, position: int):
    noted(tmp_path, 1, 2, 3)
    found = EvaluationLog(tmp_path, position).of_fit(1)
    assert found == [(step, {"loss": 1 / step, "accuracy": None}) for step in (1, 2, 3) if step <= position]
    assert [line.step for line in metrics_in(tmp_path)] == [step for step in (1, 2, 3) if step <= position]


def test_each_fit_has_its_own_and_other_evaluations_belong_to_none(tmp_path: Path):
    noted(tmp_path, 1, 2)
    noted(tmp_path, 3, fit=2)
    noted(tmp_path, 4, fit=None)
    record = EvaluationLog(tmp_path, 9)
    assert [[step for step, _ in record.of_fit(fit)] for fit in (1, 2, 3)] == [[1, 2], [3], []]
    assert [line.step for line in metrics_in(tmp_path)] == [1, 2, 3, 4]


def test_half_a_line_is_not_there(tmp_path: Path):
    noted(tmp_path, 1, 2)
    with (tmp_path / EVALUATIONS).open("ab") as file:
        file.write(b'{"kind":"evaluation","st')
    noted(tmp_path, 3)
    assert [step for step, _ in EvaluationLog(tmp_path, 9).of_fit(1)] == [1, 2, 3]


def test_a_write_that_fails_is_repeated_and_leaves_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    noted(tmp_path, 1)
    left = [True]

    def once_full(descriptor: Any, plain: Any = os.fsync) -> None:
        if left and left.pop():
            raise OSError(errno.ENOSPC, "No space left on device")
        plain(descriptor)

    record = EvaluationLog(tmp_path, 1)
    monkeypatch.setattr(evaluation_log.os, "fsync", once_full)
    record.note(2, {"loss": 0.5}, 1)
    assert not left
    assert [line.step for line in metrics_in(tmp_path)] == [1, 2]


def test_without_a_folder_it_is_kept_in_this_process():
    record = EvaluationLog(None, 0)
    record.note(1, {"loss": 2.0}, 1)
    assert record.of_fit(1) == [(1, {"loss": 2.0})]
