"""A user's feature as a pass over the program, and errors that name the feature that made the program unusable."""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from itertools import chain

from stageline.broker.codec.codecs import fault_of_codec
from stageline.pipeline.feature import Feature, FeatureRefused, naming
from stageline.pipeline.program import (
    Costs,
    Program,
    UnsoundSchedule,
    Verdict,
    adding_pass,
    check_schedule,
    fault_of_additions,
)


@dataclass(frozen=True)
class FeaturePass:
    """The pass by which a feature of the user's adds to the program."""

    feature: Feature

    def lower(self, program: Program) -> Program:
        """Return `program` as the feature lowers it.

        Raises:
            FeatureFailed: The feature's `lower` raised, or returned something else than a program.
            FeatureRefused: Additions of the feature cannot be used.
        """
        with naming(self.feature, "lower()"):
            found = self.feature.lower(program)
            if not isinstance(found, Program):
                raise TypeError(f"it returned {type(found).__name__}; expected a Program")
        if fault := fault_of_additions(program, found) or _fault_of_codecs(program, found):
            raise FeatureRefused(
                f"the program that lower() of the feature {self.feature.name} returned is wrong: {fault}"
            )
        return found


def check_lowered(program: Program, costs: Costs) -> Verdict:
    """Check a program as `check_schedule` does.

    Raises:
        UnsoundSchedule: The schedule cannot be run.
        FeatureRefused: The schedule can be run without a feature, which the text names.
    """
    try:
        return check_schedule(program, costs)
    except UnsoundSchedule as fault:
        if name := _feature_adding(program, lambda each: not _is_sound(each, costs)):
            raise FeatureRefused(
                f"the program that lower() of the feature {name} returned is wrong: with it, {fault}; without it, the "
                "schedule can be run"
            ) from fault
        raise


def demand_handlers(program: Program, computed: Collection[tuple[int, str]]) -> None:
    """Raise `FeatureRefused` if an operation has no handler.

    Args:
        program: Program of the run.
        computed: Copies of stages that this process computes, each with every kind of operation that has a handler.
    """
    copies = {copy for copy, _ in computed}
    for op in chain.from_iterable(program.step):
        kind, copy = op.action.kind, op.action.stage
        if copy in copies and (copy, kind) not in computed:
            name = _feature_adding(program, lambda each, kind=kind: kind in each.kinds)  # type: ignore[misc]
            raise FeatureRefused(
                f"the feature {name} adds the operation {op.name}, and nothing computes operations of kind {kind} on "
                f'stage {copy}: let handlers(stage) return {{"{kind}": function}}'
            )


def _fault_of_codecs(before: Program, found: Program) -> str | None:
    """Return why the codec of a queue that `found` has and `before` has not cannot be used; None if all can."""
    added = [each for name, each in found.queues.items() if name not in before.queues]
    faults = [(each.name, fault_of_codec(each.codec, many=each.per.many)) for each in added]
    return next((f"the queue {name} has {fault}" for name, fault in faults if fault), None)


def _feature_adding(program: Program, has: Callable[[Program], bool]) -> str | None:
    """Return the name of the feature whose pass gives `program` a property; None if it has it without features."""
    found = adding_pass(program, has)
    return found.feature.name if isinstance(found, FeaturePass) else None


def _is_sound(program: Program, costs: Costs) -> bool:
    try:
        check_schedule(program, costs)
    except UnsoundSchedule:
        return False
    return True
