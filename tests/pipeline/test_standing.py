"""The best evaluation so far, and when a run stops early."""

from math import inf, nan

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stageline.pipeline.evaluation import Better, Criterion, Score, Standing

HIGHER = Criterion("accuracy", Better.HIGHER, patience=3)
ACCURACIES = (0.81, 0.90, 0.93, 0.92, 0.93, nan)


def standings(criterion: Criterion, values: tuple[float | None, ...]) -> list[Standing]:
    """After each of `values`, measured every 100 steps."""
    found = [Standing(criterion)]
    for number, value in enumerate(values, 1):
        found.append(found[-1].after(100 * number, {criterion.metric: value, "other": 0.0}))
    return found[1:]


def test_the_best_and_the_count_since_it_are_as_in_the_picture():
    found = standings(HIGHER, ACCURACIES)
    assert [standing.best and standing.best.step for standing in found] == [100, 200, 300, 300, 300, 300]
    assert [standing.since for standing in found] == [0, 0, 0, 1, 2, 3]
    assert [standing.improved for standing in found] == [True, True, True, False, False, False]
    assert [standing.stops for standing in found] == [False] * 5 + [True]


def test_the_reason_names_the_step_the_metric_its_best_value_and_the_number_of_evaluations():
    assert standings(HIGHER, ACCURACIES)[-1].reason == (
        "stopped early after step 600: accuracy was not better than 0.93 (step 300) in 3 evaluations"
    )


def test_of_the_loss_the_lower_is_better_unless_told_otherwise():
    assert standings(Criterion(), (2.0, 1.0, 1.5))[-1].best == Score(200, 1.0)
    assert standings(Criterion(better=Better.HIGHER), (2.0, 1.0, 1.5))[-1].best == Score(100, 2.0)


def test_an_equal_value_is_not_better():
    assert standings(Criterion(patience=1), (1.0, 1.0))[-1].stops


@pytest.mark.parametrize("value", [None, nan, inf, -inf])
def test_a_value_that_is_no_finite_number_is_never_better(value: float | None):
    for criterion in (Criterion(), HIGHER):
        assert standings(criterion, (value,))[-1].best is None
        assert standings(criterion, (value, 0.5, value))[-1].best == Score(200, 0.5)


def test_a_run_without_any_number_stops_and_says_so():
    last = standings(Criterion(patience=1), (nan,))[-1]
    assert last.stops
    assert last.reason == "stopped early after step 100: loss was no finite number in 1 evaluation"


def test_without_patience_nothing_stops():
    assert not any(standing.stops for standing in standings(Criterion(), (1.0,) * 50))


def test_a_metric_that_was_not_measured_is_an_error():
    with pytest.raises(KeyError, match="accuracy"):
        Standing(HIGHER).after(100, {"loss": 1.0})


@given(st.lists(st.floats(allow_nan=True) | st.none(), max_size=30), st.sampled_from(Better), st.integers(1, 4))
def test_it_equals_the_loop_that_people_write(values: list[float | None], better: Better, patience: int):
    best, at, since, stopped = None, None, 0, []
    for step, value in enumerate(values):
        number = value is not None and abs(value) < inf
        if number and (best is None or (value < best if better is Better.LOWER else value > best)):
            best, at, since = value, step, 0
        else:
            since += 1
        stopped.append(since >= patience)
    found = Standing(Criterion("m", better, patience))
    each = [found := found.after(step, {"m": value}) for step, value in enumerate(values)]
    assert found.best == (None if at is None else Score(at, best))
    assert [standing.stops for standing in each] == stopped
    assert found == Standing(Criterion("m", better, patience)).after_all(
        (step, {"m": value}) for step, value in enumerate(values)
    )
