"""Following the metrics of a run that goes on."""

from pathlib import Path

import pytest

from stageline.workers.runs.metrics import (
    EVALUATIONS,
    METRICS,
    MetricsTail,
    StepMetrics,
    encoded,
    evaluation_line,
    keep_lines,
)


def trained(step: int) -> StepMetrics:
    return StepMetrics(step=step, loss=0.5, time=1.0)


def append(path: Path, text: bytes) -> None:
    with path.open("ab") as file:
        file.write(text)


def test_each_line_comes_once_and_half_a_line_when_it_is_whole(tmp_path: Path) -> None:
    tail, text = MetricsTail(tmp_path), encoded(trained(1))
    assert tail.read() == []
    append(tmp_path / METRICS, encoded(trained(0)) + text[:9])
    assert tail.read() == [trained(0)]
    append(tmp_path / METRICS, text[9:])
    assert tail.read() == [trained(1)]
    assert tail.read() == []


@pytest.mark.parametrize("start", range(4))
def test_what_a_replaced_worker_writes_again_is_not_told_again(tmp_path: Path, start: int) -> None:
    tail = MetricsTail(tmp_path)
    append(tmp_path / METRICS, b"".join(encoded(trained(step)) for step in range(3)))
    assert len(tail.read()) == 3
    keep_lines(tmp_path / METRICS, start, tmp_path / METRICS)
    append(tmp_path / METRICS, b"".join(encoded(trained(step)) for step in range(start, 5)))
    assert [line.step for line in tail.read()] == [3, 4]


def test_an_evaluation_that_comes_late_is_told(tmp_path: Path) -> None:
    tail = MetricsTail(tmp_path)
    append(tmp_path / METRICS, encoded(trained(0)) + encoded(trained(1)))
    tail.read()
    lines = [evaluation_line(1, {"loss": loss}, 1.0, None) for loss in (0.5, 0.25)]  # two after one step
    append(tmp_path / EVALUATIONS, b"".join(map(encoded, lines)))
    assert tail.read() == lines
