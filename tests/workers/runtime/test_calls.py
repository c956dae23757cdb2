"""Calls as they travel, where a run is in them, and how a call's batch becomes microbatches."""

from typing import Any

import pytest
import torch

from stageline.pipeline.data import cut
from stageline.pipeline.errors import DataError
from stageline.pipeline.program import Per
from stageline.workers.runtime.calls import (
    Call,
    CallFeed,
    CallKind,
    CallRefused,
    Position,
    cut_call,
    decode_call,
    encode_call,
)

X, Y = torch.arange(10.0).reshape(5, 2), torch.arange(5)


@pytest.mark.parametrize("ema", [False, True])
@pytest.mark.parametrize("kind", CallKind)
def test_a_call_comes_as_it_was_put(kind: CallKind, *, ema: bool) -> None:
    call = Call(kind, 7, 5, 1, {"x": X}, None, {"0.weight": Y}, ema, epoch=9, value=0.5)
    assert decode_call(encode_call(call)) == call


@pytest.mark.parametrize(
    "payload",
    [
        None,
        X,
        ("train", 0, 0, 0, None, None),
        ("drain", 0, 0, 0, None, None, None, False, 0, None),
        ("load", 0, 0, 0, 0, 0, {"a": 1}, False, 0, None),
        ("state", 0, 0, 0, None, None, None, 1, 0, None),
        ("train", 0, 0, 0, X, Y, None, False, None, None),
        ("train", 0, 0, 0, X, Y, None, False, 0, "1"),
    ],
)
def test_what_is_not_a_call_is_refused(payload: Any) -> None:
    with pytest.raises(CallRefused, match=r"a call is \(kind, number, step, .*, ema, epoch, value\)"):
        decode_call(payload)


def test_a_position_counts_calls_steps_and_evaluated_batches() -> None:
    position = Position()
    for kind in (CallKind.TRAIN, CallKind.EVALUATE, CallKind.STATE, CallKind.PREDICT, CallKind.TRAIN, CallKind.LOAD):
        position = position.after(kind)
    assert position == Position(step=2, calls=6, evaluations=2)
    found = {per: position.of(per) for per in Per}
    assert (found.pop(Per.CALL), found.pop(Per.REPLY), found.pop(Per.EVALUATED)) == (6, 4, 2)
    assert found.pop(Per.ROUND) == 0  # in no script's run
    assert set(found.values()) == {2}


def test_a_call_that_does_not_follow_is_refused_with_both_places() -> None:
    Position(3, 5, 1).check_next(Call(CallKind.STATE, 5, 3, 1))
    with pytest.raises(CallRefused, match=r"call 5 of the script follows 2 training steps .* out 5 calls, 3 steps"):
        Position(3, 5, 1).check_next(Call(CallKind.STATE, 5, 2, 1))


@pytest.mark.parametrize("kind", [CallKind.TRAIN, CallKind.EVALUATE])
def test_rows_and_shares_follow_from_whichever_part_of_the_batch_is_there(kind: CallKind) -> None:
    whole = cut(X, Y, 3)
    first, last = cut_call(Call(kind, 0, 0, 0, X, None), 3), cut_call(Call(kind, 0, 0, 0, None, Y), 3)
    for one, of_inputs, of_targets in zip(whole, first, last, strict=True):
        assert torch.equal(one.inputs, of_inputs.inputs)
        assert torch.equal(one.targets, of_targets.targets)
        assert (one.rows, one.share) == (of_inputs.rows, of_inputs.share) == (of_targets.rows, of_targets.share)


def test_what_is_predicted_has_nothing_to_measure_it_by() -> None:
    parts = cut_call(Call(CallKind.PREDICT, 0, 0, 0, X), 6)
    assert [(len(part.inputs), part.rows, part.targets) for part in parts] == [(1, 1, None)] * 5 + [(0, 0, None)]
    assert [part.rows for part in cut_call(Call(CallKind.PREDICT, 0, 0, 0), 2)] == [0] * 2


def test_of_a_prediction_without_rows_every_microbatch_is_computed() -> None:
    parts = cut_call(Call(CallKind.PREDICT, 0, 0, 0, X[:0]), 2)
    assert [(len(part.inputs), part.rows) for part in parts] == [(0, 1)] * 2


def test_a_batch_without_a_common_number_of_rows_is_refused() -> None:
    feed = CallFeed(2)
    with pytest.raises(DataError, match="no common number of rows"):
        feed.open(Call(CallKind.TRAIN, 0, 0, 0, X, Y[:4]))
