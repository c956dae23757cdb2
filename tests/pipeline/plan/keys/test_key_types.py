"""Sizes, times and arguments, as a plan file writes them."""

import pytest

from stageline.pipeline.plan import PlanRefused, from_mapping
from support.small_plans import plan


@pytest.mark.parametrize(
    ("written", "bytes_"), [(1, 1), ("1B", 1), ("3KB", 3000), ("3 KiB", 3072), ("0.5MiB", 2**19), ("2GiB", 2**31)]
)
def test_sizes_are_bytes_or_have_a_unit(written: int | str, bytes_: int) -> None:
    assert plan(queues__retain_bytes=written).queues.retain_bytes == bytes_


@pytest.mark.parametrize(
    ("written", "seconds"), [(3, 3.0), (0.5, 0.5), ("250ms", 0.25), ("1.5s", 1.5), ("2min", 120.0), ("1h", 3600.0)]
)
def test_times_are_seconds_or_have_a_unit(written: float | str, seconds: float) -> None:
    assert plan(recovery__lease=written).recovery.lease == seconds


@pytest.mark.parametrize("number", ["nan", "inf", "-inf", "+nan"])
def test_a_number_that_is_not_finite_is_no_text_when_it_is_typed(number: str) -> None:
    with pytest.raises(PlanRefused, match="is not a finite number") as refused:
        from_mapping(plan().as_mapping(), sets=[f"optimizer.lr={number}"])
    (error,) = refused.value.errors
    assert (error.key, error.where) == ("optimizer.lr", "--set")
    assert from_mapping(plan().as_mapping(), sets=[f"optimizer.lr='{number}'"]).optimizer.options["lr"] == number


@pytest.mark.parametrize("written", ["label", 1, -1, "data.py:split", ["box", "label"], [1, 2]])
def test_a_target_is_a_part_a_list_of_parts_or_the_name_of_a_function(written: str | int | list[object]) -> None:
    made = plan(data__source=None, data__dataset="data.py:train", data__target=written)
    assert made.data.target == (tuple(written) if isinstance(written, list) else written)
    assert from_mapping(made.as_mapping()) == made


@pytest.mark.parametrize("written", [1.5, True, [], [[1]], {"a": 1}, ""])
def test_what_is_no_target_is_refused(written: object) -> None:
    with pytest.raises(
        PlanRefused, match=r'data\.target.*a part of a sample, such as "label", 1 or \["box", "label"\]'
    ):
        plan(data__source=None, data__dataset="data.py:train", data__target=written)
