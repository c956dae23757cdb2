"""When a run evaluates."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stageline.pipeline.evaluation import Rounds

PICTURE = Rounds(250, 3, 100)


def test_rounds_come_as_in_the_picture():
    assert list(PICTURE.ends(0)) == [100, 200, 250]
    assert [PICTURE.batches_of(step) for step in (100, 200, 250)] == [range(3), range(3, 6), range(6, 9)]
    assert [PICTURE.step_of(batch) for batch in range(9)] == [100] * 3 + [200] * 3 + [250] * 3
    assert [PICTURE.ends_round(batch) for batch in range(9)] == [False, False, True] * 3


def test_the_round_after_a_checkpoint_comes_after_it():
    assert [PICTURE.batches_before(step) for step in (0, 99, 100, 101, 200, 201, 250)] == [0, 0, 0, 3, 3, 6, 6]
    assert list(PICTURE.ends(100)) == [100, 200, 250]
    assert list(PICTURE.ends(101)) == [200, 250]


def test_a_last_step_that_is_due_twice_is_evaluated_once():
    assert list(Rounds(200, 3, 100).ends(0)) == [100, 200]
    assert Rounds(200, 3, 100).batches_of(200) == range(3, 6)


def test_without_every_there_is_one_round_after_the_last_step():
    rounds = Rounds(6, 2)
    assert (list(rounds.ends(0)), list(rounds.ends(6))) == ([6], [6])
    assert (rounds.batches_of(6), rounds.batches_of(3)) == (range(2), range(0))


def test_a_run_that_holds_nothing_back_never_evaluates():
    rounds = Rounds(6, 0, 2)
    assert list(rounds.ends(0)) == [6]
    assert not any(rounds.due(step) or rounds.batches_before(step) for step in range(7))


@given(st.integers(1, 40), st.integers(1, 4), st.none() | st.integers(1, 50), st.data())
def test_from_every_checkpoint_the_same_rounds_follow(steps: int, batches: int, every: int | None, data: st.DataObject):
    rounds = Rounds(steps, batches, every)
    whole = [(step, batch) for step in rounds.ends(0) for batch in rounds.batches_of(step)]
    assert [batch for _, batch in whole] == list(range(len(whole)))
    assert all(rounds.step_of(batch) == step for step, batch in whole)
    start = data.draw(st.integers(0, steps))
    rest = [(step, batch) for step in rounds.ends(start) for batch in rounds.batches_of(step)]
    assert rest == whole[rounds.batches_before(start) :]
    assert rest == [each for each in whole if each[0] >= start]


@pytest.mark.parametrize("step", [1, 60, 249])
def test_between_two_rounds_nothing_is_due(step: int):
    assert not PICTURE.due(step)
    assert PICTURE.batches_of(step) == range(PICTURE.batches_before(step), PICTURE.batches_before(step))
