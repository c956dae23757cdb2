"""A run that is resumed goes on with the data that it began with, or is refused."""

from pathlib import Path

import pytest
import torch

from stageline.pipeline.errors import ModelRefused
from stageline.workers.extras.preflight.trial import record
from stageline.workers.extras.preflight.trial_result import Transcript
from stageline.workers.launch.launch import FILE, demand_same_data, keep_first_batches


def transcript(value: float = 1.0, held_out: float = 0.0) -> Transcript:
    inputs = torch.zeros(4, 3)
    inputs[2, 1] = value
    first = tuple(record(inputs, "inputs", by_row=True))
    return Transcript(first, first, tuple(record(torch.full((2,), held_out), "targets", by_row=True)), ())


def test_the_same_data_go_on(tmp_path: Path) -> None:
    keep_first_batches(tmp_path, transcript())
    demand_same_data(tmp_path, transcript())


@pytest.mark.parametrize(
    ("now", "words"),
    [
        (transcript(2.0), r"data\.source: batch\(0\) gives other values than when the run began: row 2 of inputs\."),
        (transcript(held_out=1.0), r"data\.source: held_out\(\) gives other values .* row 0 of targets\."),
    ],
)
def test_other_data_are_refused_with_the_first_row_that_differs(tmp_path: Path, now: Transcript, words: str) -> None:
    keep_first_batches(tmp_path, transcript())
    keep_first_batches(tmp_path, now)  # a run that goes on keeps what it began with
    with pytest.raises(ModelRefused, match=words):
        demand_same_data(tmp_path, now)


@pytest.mark.parametrize("text", [None, b"{", b"[]"])
def test_without_a_record_nothing_is_compared(tmp_path: Path, text: bytes | None) -> None:
    if text is not None:
        (tmp_path / FILE).write_bytes(text)
    demand_same_data(tmp_path, transcript())
