"""The table of exit codes: each code has a row, the page shows the table, and ends without a result are no results."""

import re

import pytest

from stageline.pipeline.errors import ExitCode
from stageline.pipeline.exit_codes import EXIT_CODES, Afterwards, afterwards
from support.paths import DOCS

ROW = re.compile(r"^\| (\d+) \| (.*) \| (.*) \|$", re.MULTILINE)


def test_every_exit_code_has_a_row_in_the_table_and_the_page_shows_the_table():
    assert set(EXIT_CODES) == set(ExitCode)
    page = (DOCS / "reference" / "exit-codes.md").read_text()
    told = [(str(int(code)), ended.meaning, str(ended.afterwards)) for code, ended in sorted(EXIT_CODES.items())]
    assert ROW.findall(page) == told


@pytest.mark.parametrize(
    ("codes", "then"),
    [
        ((0, 2, 75, 77, 78), Afterwards.FINAL),
        ((3, 69), Afterwards.PATIENT),
        ((76,), Afterwards.ELSEWHERE),
        ((1, 130, 42, None), Afterwards.AGAIN),
    ],
)
def test_a_worker_is_started_again_unless_that_would_only_repeat_its_end(
    codes: tuple[int | None, ...], then: Afterwards
):
    assert {afterwards(code) for code in codes} == {then}


def test_no_worker_of_a_run_that_is_over_is_started_again():
    assert {afterwards(code, over=True) for code in (None, *ExitCode)} == {Afterwards.FINAL}
