"""Patterns of names, and what an error says about one that matches nothing."""

import pytest

from stageline.pipeline.model_names import hint, matches, near, unmatched

NAMES = ["0.weight", "0.bias", "2.norm.weight", "2.norm.bias", "head.weight"]


@pytest.mark.parametrize(
    ("pattern", "found"),
    [
        ("*.bias", ["0.bias", "2.norm.bias"]),
        ("2.*", ["2.norm.weight", "2.norm.bias"]),
        ("head.weight", ["head.weight"]),
        ("[02].*ias", ["0.bias", "2.norm.bias"]),
        ("HEAD.*", []),
    ],
)
def test_a_star_matches_dots_too_and_case_counts(pattern: str, found: list[str]) -> None:
    assert [name for name in NAMES if matches(name, ["nothing", pattern])] == found
    assert unmatched(["0.*", pattern], NAMES) == ([] if found else [pattern])


def test_no_pattern_matches_nothing() -> None:
    assert not matches("0.weight", [])


def test_the_hint_gives_near_names_a_modules_pattern_or_says_that_there_are_none() -> None:
    assert hint("hed.weight", NAMES).startswith("Parameters have names such as head.weight")
    assert hint("2.norm", NAMES) == 'It names a module: write "2.norm.*" for its parameters'
    assert hint("*", []) == "The model has no parameters"


def test_where_nothing_is_near_the_first_names_are_shown() -> None:
    assert near("zzzz", NAMES) == "0.weight, 0.bias, 2.norm.weight, 2.norm.bias"
