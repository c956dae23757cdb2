"""Errors of the user's code are described with the line that raised them."""

from pathlib import Path

import pytest

from stageline.pipeline.errors import describe_error


def test_an_error_is_described_with_its_file_and_line():
    with pytest.raises(ValueError, match="seven") as caught:
        int("seven")
    place = f"{Path(__file__).name}, line {caught.tb.tb_lineno}"
    assert describe_error(caught.value) == f"ValueError: invalid literal for int() with base 10: 'seven' ({place})"


def test_an_error_that_was_never_raised_has_no_line():
    assert describe_error(KeyError("a")) == "KeyError: 'a'"
