"""The result of a run, from the broker's last status of it."""

import msgspec

from stageline.workers.runs.folder import Result, result_of

STATUS = {
    "training_steps": 6,
    "last_loss": {"step": 5, "loss": 0.25},
    "losses": {"0": 1.5, "2": None},
    "metrics": {"accuracy": 0.5, "lost": "nan"},
    "weights_sha256": "ab",
    "restarts": None,
}


def test_a_result_is_what_the_last_status_holds():
    result = result_of("small-1", 3, STATUS, 1.23456)
    assert (result.run, result.steps, result.microbatches) == ("small-1", 6, 3)
    assert (result.loss, result.seconds, result.restarts) == (0.25, 1.235, 0)


def test_a_last_step_without_rows_has_no_loss():
    assert result_of("small-1", 3, STATUS | {"last_loss": None}, 1.0).loss is None
    assert result_of("small-1", 3, STATUS | {"last_loss": {"step": 5, "loss": None}}, 1.0).loss is None


def test_a_result_comes_back_from_its_file():
    result = result_of("small-1", 3, STATUS, 1.0)
    assert msgspec.json.decode(msgspec.json.encode(result), type=Result) == result
