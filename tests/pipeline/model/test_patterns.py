"""Patterns of names, and the names that a wrong one was probably meant to match."""

from stageline.pipeline.model.patterns import matches, near_names, unmatched

NAMES = ["encoder.layer.4", "encoder.layer.40", "encoder.layer.41", "head"]


def test_a_star_matches_dots_too_and_capitals_differ() -> None:
    assert [name for name in NAMES if matches(name, ["encoder*4?", "HEAD"])] == ["encoder.layer.40", "encoder.layer.41"]


def test_those_that_match_nothing_are_found() -> None:
    assert unmatched(["head", "tail", "*.4", "layer"], NAMES) == ["tail", "layer"]


def test_near_names_come_before_the_first_ones() -> None:
    assert near_names("encoder.layr.41", NAMES).startswith("encoder.layer.41, ")
    assert near_names("zzz", NAMES) == "encoder.layer.4, encoder.layer.40, encoder.layer.41"
