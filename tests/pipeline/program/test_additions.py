"""Additions of a user's feature to a program: operations and queues of its own, beside those of stageline."""

from collections.abc import Callable
from dataclasses import replace
from itertools import chain

import pytest
from msgspec.structs import replace as replace_op

from stageline.pipeline.program import (
    Evaluation,
    NormClipping,
    Pass,
    Per,
    Program,
    Queue,
    Replays,
    ScriptCalls,
    SumExchange,
    TiedStages,
    adding_pass,
    compile_program,
    fault_of_additions,
)
from stageline.pipeline.schedule import Action, Schedule, make_schedule
from support.shapes import line

PLAIN = make_schedule("1f1b", line(3), 4)
FROZEN = make_schedule("1f1b", line(3), 4, first_trainable=1)
REPLICATED = make_schedule("1f1b", ((0,), (1,), (2,), (3,)), 4, shares=((1,), (1, 1), (1,)))
EVERYTHING: list[tuple[Schedule, list[Pass]]] = [
    (PLAIN, [TiedStages(((0, 2),)), NormClipping(), Evaluation(is_told=True), ScriptCalls()]),
    (PLAIN, [TiedStages(((0, 2),), "step")]),
    (FROZEN, [Replays(3)]),
    (REPLICATED, [SumExchange()]),
]
FLOWS = {queue.flow for schedule, passes in EVERYTHING for queue in compile_program(schedule, passes).queues.values()}


def adding(program: Program, name: str, kind: str = "G") -> Program:
    """`program` with an operation of stage 1 whose result goes to one of stage 0."""
    queue = Queue(name=name, producer=1, consumer=0, source=1, target=0, per=Per.STEP)
    ops = {1: program.made(Action(kind, 1), gives=[name]), 0: program.made(Action(kind, 0), takes=[name])}
    return program.before_updates(lambda stages: [ops[each] for each in stages if each in ops]).with_queues([queue])


def test_an_operation_and_a_queue_of_its_own_are_a_feature_s_to_add() -> None:
    for schedule, passes in EVERYTHING[:3]:
        before = compile_program(schedule, passes)
        assert fault_of_additions(before, adding(before, "gradnorms-0")) is None
        assert fault_of_additions(before, before) is None


@pytest.mark.parametrize("flow", sorted(FLOWS))
def test_every_name_that_queues_of_stageline_have_is_refused_even_where_the_run_has_none_of_it(flow: str) -> None:
    before = compile_program(PLAIN)
    fault = fault_of_additions(before, adding(before, f"{flow}-0"))
    assert fault is not None
    assert f"{flow}-0" in fault


WRONG: dict[str, Callable[[Program], Program]] = {
    "all 3 workers": lambda made: replace(made, sections=tuple(replace(part, lists=()) for part in made.sections)),
    "another schedule": lambda made: compile_program(FROZEN),
    "'0G0' among its operations": lambda made: made.before_updates(lambda stages: [Action("G", 0)]),  # type: ignore[list-item]
    "kind 'None'": lambda made: made.before_updates(lambda stages: [made.made(Action(None, 0))]),  # type: ignore[arg-type]
    "gives of 0F0 is changed": lambda made: made.rewired(lambda op: replace_op(op, gives=())),
    "takes of 1F0 is changed": lambda made: made.rewired(
        lambda op: replace_op(op, takes=op.takes[1:] if op.action.kind == "F" else op.takes)
    ),
    "gradnorms-0 begins or ends": lambda made: adding(made, "gradnorms-0").requeued(
        lambda queue: replace_op(queue, begins=3) if queue.flow == "gradnorms" else queue
    ),
}


@pytest.mark.parametrize("fault", WRONG)
def test_a_program_that_workers_cannot_run_or_that_lost_what_was_there_is_refused_by_its_fault(fault: str) -> None:
    before = compile_program(PLAIN)
    assert fault in (fault_of_additions(before, WRONG[fault](before)) or "")


def test_an_operation_that_is_there_may_give_to_a_further_queue() -> None:
    before = compile_program(PLAIN)
    queue = Queue(name="copies-0", producer=1, consumer=0, source=1, target=0, per=Per.STEP)
    found = adding(before, "gradnorms-0").with_queues([queue])
    wired = {("U", 1): {"gives": ("copies-0",)}, ("G", 0): {"takes": ("gradnorms-0", "copies-0")}}
    found = found.rewired(lambda op: replace_op(op, **wired.get(op.action[:2], {})))
    assert fault_of_additions(before, found) is None


def test_two_features_do_not_share_a_queue() -> None:
    first = adding(compile_program(PLAIN), "gradnorms-0")
    assert "0H uses the queue gradnorms-0" in (fault_of_additions(first, adding(first, "gradnorms-0", "H")) or "")


def test_a_property_of_a_program_is_owed_to_the_first_pass_that_gives_it() -> None:
    ties, clip = TiedStages(((0, 2),)), NormClipping()
    program = compile_program(PLAIN, [ties, clip])

    def runs(kind: str, made: Program) -> bool:
        return any(op.action.kind == kind for op in chain.from_iterable(made.step))

    assert adding_pass(program, lambda made: runs("T", made)) is ties
    assert adding_pass(program, lambda made: runs("C", made)) is clip
    assert adding_pass(program, lambda made: runs("F", made)) is None
