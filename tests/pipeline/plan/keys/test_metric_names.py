"""Names of metrics in the results of an evaluation."""

import pytest

from stageline.pipeline.plan.keys.models import numbered


@pytest.mark.parametrize(
    ("names", "titles"),
    [
        (["accuracy", "top"], ["accuracy", "top"]),
        (["accuracy", "top", "accuracy"], ["accuracy_0", "top", "accuracy_2"]),
        (["a", "a", "a_1"], ["a_0", "a_1", "a_1_2"]),
        (["a_1", "a", "a"], ["a_1_0", "a_1", "a_2"]),
    ],
)
def test_each_metric_has_a_name_of_its_own(names: list[str], titles: list[str]) -> None:
    assert numbered(names) == titles
    assert numbered(titles) == titles  # a local run's plan has the names already numbered
