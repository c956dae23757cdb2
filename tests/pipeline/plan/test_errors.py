"""How one error of a plan reads."""

from pathlib import Path

import pytest

from stageline.pipeline.plan import PlanRefused, read_plan
from support.small_plans import SMALLEST, the_error


def test_an_error_reads_as_one_sentence_with_place_key_value_and_what_is_wanted(file: Path) -> None:
    file.write_text(SMALLEST.replace("64", '"many"'))
    with pytest.raises(PlanRefused) as refused:
        read_plan(file)
    wanted = f'{file}:11: data.batch_size = "many": expected a whole number of at least 1, got text [SL101]'
    assert str(refused.value) == wanted


def test_a_long_value_is_shown_shortened() -> None:
    error = the_error(run__epochs=list(range(1000)))
    assert error.value.endswith("...")
    assert len(error.value) == 60
