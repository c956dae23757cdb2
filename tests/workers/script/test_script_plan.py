"""A script's arguments as a plan."""

import pytest

from stageline.workers.script.script_plan import LineOptions, plan_of


@pytest.mark.parametrize("value", [False, "false"])
def test_a_setting_may_be_pythons_false_or_the_plans(value: object) -> None:
    options = LineOptions(loss=len, optimizer=len, cut=[1], settings={"data.check": value})  # type: ignore[arg-type]
    assert plan_of(options, 2).data.check is False
