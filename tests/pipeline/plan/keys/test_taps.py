"""The table of a plan that says which layers are tapped."""

from support.small_plans import plan, the_error


def test_by_default_every_tenth_step_of_training_is_stored() -> None:
    taps = plan(taps__layers=["5"]).taps
    assert taps is not None
    assert ([step for step in range(25) if taps.has(step)], taps.evaluation) == ([0, 10, 20], False)


def test_a_plan_without_the_table_has_the_digest_that_it_had_before_there_was_one() -> None:
    assert "taps" not in plan().as_mapping()
    assert plan(taps__layers=["5"]).digest() != plan().digest()


def test_wrong_values_are_refused_by_name() -> None:
    assert str(the_error(taps__every=2)).startswith("taps.layers: missing; expected a list of patterns such as")
    assert the_error(taps__layers=[]).key == "taps.layers"
    assert the_error(taps__layers="5").reason == 'expected a list of patterns such as ["encoder.layer.4*"], got text'
    assert the_error(taps={"layers": ["5"], "every": 0}).key == "taps.every"
    assert the_error(taps={"layers": ["5"], "evaluation": 1}).key == "taps.evaluation"
