"""Lines about what limits a run: an answer that the broker has given before says from when it is."""

import pytest

from stageline.workers.cli.tables.answers import limits

SLOW = {"steps": [3, 12], "seconds": 0.25, "findings": [], "text": "nothing limits it"}


@pytest.mark.parametrize(("why", "old"), [({"age": 4.2}, "4.2 s ago"), ({"age": 0.0}, ""), ({}, "")])
def test_the_age_of_an_answer_is_told_if_it_is_not_new(why: dict[str, object], old: str) -> None:
    first, *_ = limits({"slow": SLOW, **why})
    assert "steps 3 to 12" in first
    assert first.endswith(f"as of {old})") if old else "as of" not in first


def test_a_run_of_which_too_little_is_known_has_no_line() -> None:
    assert list(limits({"slow": None, "age": 0.0})) == []
