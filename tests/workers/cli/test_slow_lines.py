"""Lines about what limits a run: an answer that the broker has given before says from when it is."""

from datetime import datetime

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


def test_a_limit_that_was_not_always_there_has_the_time_when_it_came() -> None:
    found = {"cause": "compute", "text": "stage 1 is slow, since step 12", "remedies": []}
    began = datetime(2026, 11, 29, 12, 31, 7).timestamp()
    _, line = limits({"slow": {**SLOW, "findings": [{**found, "began": began}]}})
    assert line.endswith("since step 12 (2026-11-29 12:31:07)")
    _, line = limits({"slow": {**SLOW, "findings": [{**found, "began": None}]}})
    assert line.endswith("since step 12")
