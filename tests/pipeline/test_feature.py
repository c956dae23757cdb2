"""Hooks are composed in a declared order, cost nothing where they do nothing, and name themselves where they fail."""

from collections.abc import Collection, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

from stageline.pipeline.errors import StageError
from stageline.pipeline.feature import (
    Compute,
    Feature,
    FeatureFailed,
    FeatureRefused,
    all_handlers,
    compose,
    demand_hooks,
    ordered,
)
from stageline.pipeline.tree import Tree


class PlainOperation(NamedTuple):
    kind: str = "F"
    stage: int = 1
    step: int = 2
    microbatch: int = 3

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch} of step {self.step}"


class NamedFeature(Feature):
    """Notes its name before and after what it wraps."""

    def __init__(self, name: str, *, inside: Collection[str] = (), outside: Collection[str] = ()) -> None:
        self.name, self.inside, self.outside = name, inside, outside

    def around(self, stage: Any, kind: str, compute: Compute) -> Compute:
        def noted(operation: Any, received: Sequence[Tree]) -> Tree:
            return [self.name, compute(operation, received), self.name]

        return noted if kind == "F" else compute


class Dividing(Feature):
    """Fails in a hook, or computes operations of its own that fail."""

    def around(self, stage: Any, kind: str, compute: Compute) -> Compute:
        def divided(operation: Any, received: Sequence[Tree]) -> Tree:
            compute(operation, received)
            raise ZeroDivisionError("by zero")

        return divided if kind == "F" else compute

    def handlers(self, stage: Any) -> Mapping[str, Compute]:
        return {"D": lambda operation, received: 1 // 0}


def computed(operation: Any, received: Sequence[Tree]) -> Tree:
    return list(received)


def names(features: Sequence[Feature]) -> list[str]:
    return [each.name for each in features]


def test_a_feature_that_overrides_nothing_changes_nothing() -> None:
    nothing = Feature()
    assert compose([nothing, nothing], 0, "F", computed) is computed
    assert nothing.lower("program") == "program"
    assert nothing.state(0) is None
    assert not list(nothing.refuses("plan"))
    assert nothing.name == "Feature"


def test_the_first_feature_of_a_list_is_the_outermost() -> None:
    compute = compose([NamedFeature("a"), NamedFeature("b")], 0, "F", computed)
    assert compute(PlainOperation(), ["x"]) == ["a", ["b", ["x"], "b"], "a"]


def test_a_kind_that_no_feature_wraps_is_computed_by_the_stage_itself() -> None:
    assert compose([NamedFeature("a"), NamedFeature("b")], 0, "B", computed) is computed


def test_a_feature_that_only_trains_is_left_out_of_evaluations() -> None:
    training, always = NamedFeature("training"), NamedFeature("always")
    training.only_trains = True
    compute = compose([always, training], 0, "F", computed)
    found = [compute(SimpleNamespace(evaluates=evaluates), ["x"]) for evaluates in (False, True)]
    assert found == [["always", ["training", ["x"], "training"], "always"], ["always", ["x"], "always"]]


def test_features_keep_their_order_unless_they_declare_another() -> None:
    assert names(ordered([NamedFeature("a"), NamedFeature("b"), NamedFeature("c")])) == ["a", "b", "c"]
    assert names(ordered([NamedFeature("a", inside=("c",)), NamedFeature("b"), NamedFeature("c")])) == ["b", "c", "a"]
    assert names(ordered([NamedFeature("a"), NamedFeature("b", outside=("a",))])) == ["b", "a"]


def test_a_neighbour_may_be_absent_if_it_is_known() -> None:
    assert names(ordered([NamedFeature("a", inside=("recorder",))], known=("recorder",))) == ["a"]


def test_an_unknown_neighbour_is_refused_with_both_names() -> None:
    with pytest.raises(FeatureRefused, match="noise names recordre"):
        ordered([NamedFeature("noise", inside=("recordre",)), NamedFeature("recorder")])


def test_contradicting_orders_are_refused_with_the_names() -> None:
    circle = [
        NamedFeature("a", outside=("b",)),
        NamedFeature("b", outside=("c",)),
        NamedFeature("c", outside=("a",)),
        NamedFeature("d"),
    ]
    with pytest.raises(FeatureRefused, match="b outside c"):
        ordered(circle)
    with pytest.raises(FeatureRefused, match="a outside a"):
        ordered([NamedFeature("a", inside=("a",))])


def test_two_features_of_one_name_are_refused() -> None:
    with pytest.raises(FeatureRefused, match="noise"):
        ordered([NamedFeature("noise"), NamedFeature("noise")])


def test_a_hook_that_fails_is_named_with_the_operation() -> None:
    compute = compose([NamedFeature("outer"), Dividing(), NamedFeature("inner")], 0, "F", computed)
    with pytest.raises(FeatureFailed, match=r"Dividing.*1F3 of step 2.*ZeroDivisionError.*by zero") as raised:
        compute(PlainOperation(), [])
    assert isinstance(raised.value.__cause__, ZeroDivisionError)


@pytest.mark.parametrize("error", [StageError("nothing is stashed"), ValueError("of the model"), KeyboardInterrupt()])
def test_what_the_stage_itself_raises_passes_as_it_is(error: BaseException) -> None:
    def failing(operation: Any, received: Sequence[Tree]) -> Tree:
        raise error

    with pytest.raises(type(error)) as raised:
        compose([NamedFeature("a"), NamedFeature("b")], 0, "F", failing)(PlainOperation(), [])
    assert raised.value is error


def test_a_feature_computes_operations_of_its_own() -> None:
    found = all_handlers([NamedFeature("a"), Dividing()], 0, {"B": computed})
    assert found.keys() == {"B", "D"}
    assert found["B"] is computed
    with pytest.raises(FeatureFailed, match=r"Dividing.*1D0 of step 2"):
        found["D"](PlainOperation("D", microbatch=0), [])


def test_two_handlers_of_one_kind_are_refused_with_both_owners() -> None:
    with pytest.raises(FeatureRefused, match=r"Dividing.*kind D.*the stage itself"):
        all_handlers([Dividing()], 0, {"D": computed})


def test_a_wrapper_that_is_no_function_is_refused_with_feature_and_kind() -> None:
    class Forgetful(Feature):
        def around(self, stage: Any, kind: str, compute: Compute) -> Any:
            """Return nothing."""

    with pytest.raises(FeatureRefused, match=r"Forgetful returned None from around\(\) .* kind F; expected a function"):
        compose([Forgetful()], 0, "F", computed)


@pytest.mark.parametrize(("name", "meant"), [("lowr", "lower"), ("handler", "handlers"), ("states", "state")])
def test_a_method_that_is_nearly_a_hook_is_refused_with_the_hook(name: str, meant: str) -> None:
    misspelled = type("Misspelled", (Feature,), {name: lambda self, given: given})()
    with pytest.raises(FeatureRefused, match=rf"Misspelled has a method {name}, .* did you mean {meant}\?"):
        demand_hooks(misspelled)


def test_methods_and_values_of_other_names_are_the_features_own() -> None:
    demand_hooks(type("Noisy", (Feature,), {"noise": len, "_states": len, "states": 7})())
    demand_hooks(type("Thread", (Feature,), dict.fromkeys(("start", "stage", "stats", "store"), len))())
