"""Results of rounds of evaluation: each is kept once, and compared in the order of their steps."""

import json
from itertools import permutations
from math import inf, nan

import pytest

from stageline.broker.control.records import EvaluationRecord
from stageline.broker.ledger.evaluations import (
    Evaluations,
    EvaluationsDiffer,
    fact_name,
    fact_of,
    not_finite,
    record_of,
    stored_in,
    told,
)
from stageline.pipeline.evaluation import Better, Criterion, Score

LOSSES = {100: 0.9, 200: 0.5, 300: 0.7, 400: 0.5}
ROUNDS = [EvaluationRecord(step, 8, loss, {"accuracy": 1 - loss}) for step, loss in LOSSES.items()]
ODD = EvaluationRecord(500, 8, nan, {"low": -inf, "high": inf, "fine": 0.1})


def kept(rounds: list[EvaluationRecord], criterion: Criterion | None = Criterion()) -> Evaluations:  # noqa: B008
    evaluations = Evaluations(criterion)
    for record in rounds:
        assert evaluations.add(record)
    return evaluations


def test_rounds_are_compared_in_the_order_of_their_steps_however_they_come():
    for rounds in permutations(ROUNDS):
        found = kept(list(rounds))
        assert [each.step for each in found] == [100, 200, 300, 400]
        assert (found.newest, found.standing().best, found.standing().since) == (ROUNDS[-1], Score(200, 0.5), 2)


@pytest.mark.parametrize(("step", "best"), [(99, None), (100, 100), (199, 100), (200, 200), (10_000, 200)])
def test_what_was_best_at_an_earlier_step_is_known(step: int, best: int | None):
    standing = kept(ROUNDS).standing(step)
    assert (standing.best and standing.best.step) == best


def test_a_round_that_is_told_again_changes_nothing():
    found = kept([*ROUNDS, ODD])
    assert not any(found.add(record_of(json.loads(json.dumps(fact_of(record))))) for record in (*ROUNDS, ODD))
    assert len(list(found)) == 5


def test_a_round_that_finds_something_else_the_second_time_is_an_error():
    with pytest.raises(
        EvaluationsDiffer, match=r"after step 200 found loss 0\.25, and loss 0\.5, accuracy 0\.5 before"
    ):
        kept(ROUNDS).add(EvaluationRecord(200, 8, 0.25))


def test_a_round_without_the_metric_that_is_compared_is_an_error_and_not_kept():
    found = kept([], Criterion("accuracy", Better.HIGHER))
    with pytest.raises(KeyError, match="accuracy"):
        found.add(EvaluationRecord(100, 8, 0.25))
    assert found.newest is None


def test_without_a_criterion_nothing_is_best():
    assert kept(ROUNDS, None).standing() is None


def test_a_round_is_stored_as_json_and_comes_back_to_the_bit():
    facts = {fact_name(record): json.loads(json.dumps(fact_of(record), allow_nan=False)) for record in (*ROUNDS, ODD)}
    assert [str(record) for record in stored_in({**facts, "registry": {}})] == [*map(str, ROUNDS), str(ODD)]


def test_what_is_no_finite_number_is_named():
    assert str(not_finite(ODD)) == "{'low': -inf, 'high': inf, 'loss': nan}"
    assert told(ODD) == "loss nan, low -inf, high inf, fine 0.1"
    assert told(EvaluationRecord(0, 0)) == ""
