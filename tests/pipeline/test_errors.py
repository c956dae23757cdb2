"""Errors of the user's code are described with the line that raised them."""

import importlib
from pathlib import Path

import pytest

from stageline.pipeline.data import DataError, Rows
from stageline.pipeline.errors import describe_error, documented, error_text, failure_code


def test_an_error_is_described_with_its_file_and_line():
    with pytest.raises(ValueError, match="seven") as caught:
        int("seven")
    place = f"{Path(__file__).name}, line {caught.tb.tb_lineno}"
    assert describe_error(caught.value) == f"ValueError: invalid literal for int() with base 10: 'seven' ({place})"


def test_a_received_exit_code_is_a_documented_one_and_of_a_failure_never_0():
    assert [documented(code) for code in (0, 75, 78, 7, -9, 2**40)] == [0, 75, 78, 1, 1, 1]
    assert [failure_code(code) for code in (0, 75, 78, 7, -9, 2**40)] == [1, 75, 78, 1, 1, 1]


def test_an_error_that_was_never_raised_has_no_line():
    assert describe_error(KeyError("a")) == "KeyError: 'a'"


def test_a_line_of_stageline_or_of_the_interpreter_is_not_shown_as_the_users():
    with pytest.raises(DataError) as ours:
        Rows(1, 2, batch_size=1, seed=0)
    with pytest.raises(ModuleNotFoundError) as frozen:
        importlib.import_module("no_such_package")
    for caught in (ours, frozen):
        assert describe_error(caught.value) == error_text(caught.value)


def test_an_error_whose_text_cannot_be_made_is_told_all_the_same():
    """The user read of a bug in stageline."""

    class Unprintable(Exception):
        def __str__(self):
            raise RuntimeError("no words")

    assert error_text(Unprintable()) == "Unprintable: (its text cannot be made: RuntimeError)"


def test_control_characters_of_an_error_do_not_reach_the_terminal():
    assert error_text(ValueError("a\x1b[2Jb\n\tc")) == "ValueError: a\\x1b[2Jb\n\tc"
    assert error_text(StopIteration()) == "StopIteration"
