"""Lines of metrics, and what of them a run goes on with."""

from math import inf, isnan, nan
from pathlib import Path

import msgspec
import pytest

from stageline.workers.runs.metrics import (
    EVALUATIONS,
    METRICS,
    EvaluationMetrics,
    MetricsLine,
    StepMetrics,
    decoded,
    encoded,
    evaluation_line,
    keep_lines,
    metrics_in,
)


def trained(step: int) -> StepMetrics:
    return StepMetrics(step=step, loss=1 / (step + 1), learning_rates=(0.1,), rows=8, time=100.0 + step)


def evaluated(step: int) -> EvaluationMetrics:
    return evaluation_line(step, {"loss": 0.5, "accuracy": 0.25}, 100.0 + step, None)


LINES: list[MetricsLine] = [trained(0), trained(1), evaluated(2), trained(2), trained(3), evaluated(4)]


def write(path: Path, lines: list[MetricsLine], rest: bytes = b"") -> None:
    path.write_bytes(b"".join(map(encoded, lines)) + rest)


def test_a_line_is_json_that_says_of_what_kind_it_is():
    assert msgspec.json.decode(encoded(trained(1))) == {
        "kind": "step",
        "step": 1,
        "loss": 0.5,
        "learning_rates": [0.1],
        "rows": 8,
        "time": 101.0,
    }
    assert msgspec.json.decode(encoded(evaluated(2)))["kind"] == "evaluation"


@pytest.mark.parametrize("line", [*LINES, evaluation_line(3, {"loss": None}, 1.0, 2)])
def test_a_line_is_read_as_it_was_written(line: MetricsLine):
    assert decoded(encoded(line)) == line


def test_what_is_no_number_is_a_text_in_the_file():
    line = evaluation_line(1, {"loss": nan, "a": inf, "b": -inf, "c": None}, 1.0, None)
    assert (line.loss, line.metrics) == ("nan", {"a": "inf", "b": "-inf", "c": None})
    assert isnan(line.values["loss"] or 0.0)
    assert {name: line.values[name] for name in "abc"} == {"a": inf, "b": -inf, "c": None}


@pytest.mark.parametrize(("step", "kept"), [(0, 0), (1, 1), (2, 3), (3, 4), (4, 6), (9, 6)])
def test_the_lines_after_so_many_steps_are_those_of_the_steps_before_and_of_evaluations_up_to_there(
    tmp_path: Path, step: int, kept: int
):
    write(tmp_path / METRICS, LINES)
    newest = keep_lines(tmp_path / METRICS, step, tmp_path / METRICS)
    assert list(metrics_in(tmp_path)) == LINES[:kept]
    assert newest == max((line.step for line in LINES[:kept] if isinstance(line, EvaluationMetrics)), default=-1)


@pytest.mark.parametrize("rest", [encoded(trained(5))[:-1], encoded(trained(5))[:7], b"\0" * 30 + b"\n", b"\xff\n{}\n"])
def test_half_a_line_and_garbage_at_the_end_are_cut_off(tmp_path: Path, rest: bytes):
    write(tmp_path / METRICS, LINES, rest)
    assert list(metrics_in(tmp_path)) == LINES
    keep_lines(tmp_path / METRICS, 9, tmp_path / METRICS)
    assert (tmp_path / METRICS).read_bytes() == b"".join(map(encoded, LINES))


def test_the_lines_that_are_kept_have_the_same_bytes(tmp_path: Path):
    write(tmp_path / METRICS, LINES)
    before = (tmp_path / METRICS).read_bytes()
    keep_lines(tmp_path / METRICS, 9, tmp_path / "new" / METRICS)
    assert (tmp_path / "new" / METRICS).read_bytes() == before


def test_without_a_file_there_are_no_lines_and_a_file_is_made(tmp_path: Path):
    assert keep_lines(tmp_path / METRICS, 3, tmp_path / METRICS) == -1
    assert list(metrics_in(tmp_path)) == []


def test_what_a_script_has_evaluated_comes_between_the_steps(tmp_path: Path):
    write(tmp_path / METRICS, [line for line in LINES if isinstance(line, StepMetrics)])
    write(tmp_path / EVALUATIONS, [line for line in LINES if isinstance(line, EvaluationMetrics)])
    assert list(metrics_in(tmp_path)) == LINES


def test_a_folder_without_metrics_is_an_error(tmp_path: Path):
    with pytest.raises(FileNotFoundError, match=METRICS):
        metrics_in(tmp_path)
