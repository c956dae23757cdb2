"""Lists that lack an action, have one too many, or have one before what it builds on."""

import pytest
from msgspec import structs

from stageline.pipeline.program import (
    Costs,
    Disordered,
    Incomplete,
    Op,
    Program,
    TiedStages,
    check_schedule,
    compile_program,
)
from support.shapes import by_hand, times


def test_a_backward_may_be_split() -> None:
    verdict = check_schedule(
        by_hand("0F0 0F1 0I0 0W0 0I1 0W1 0U", "1F0 1I0 1F1 1I1 1W0 1W1 1U", microbatches=2),
        Costs.even(2, forward=1, backward=2),
    )
    assert times(verdict, 0)["0I1"] == (5, 6)  # at once after 1I1, which did not wait for 1W0
    assert verdict.stage_peak == (2, 2)  # a microbatch is held until its W


def test_halves_and_whole_backwards_may_be_mixed() -> None:
    check_schedule(by_hand("0F0 0B0 0F1 0I1 0W1 0U", microbatches=2))


@pytest.mark.parametrize(
    ("lists", "reason"),
    [
        (("0F0 0U",), "worker 0 never runs 0B0 of step 0"),
        (("0F0 0B0",), "worker 0 never runs 0U of step 0"),
        (("0F0 0I0 0U",), "worker 0 never runs 0W0 of step 0"),
        (("0F0 0B0 0T0 0U",), "worker 0 runs 0T0 of step 0 though it is none of its actions"),
        (("0F0 0F0 0B0 0U",), "worker 0 runs 0F0 of step 0 more than once"),
        (("0F0 0B0 0I0 0W0 0U",), "worker 0 runs 0I0 of step 0 though it is none of its actions"),
        (("0F0 0F1 0B0 0U",), "worker 0 runs 0F1 of step 0 though it is none of its actions"),
        (("0F0 0B0 0U 1F0", "1F0 1B0 1U"), "worker 0 runs 1F0 of step 0 though it is none of its actions"),
    ],
)
def test_a_list_must_have_every_action_once_and_no_other(lists: tuple[str, ...], reason: str) -> None:
    with pytest.raises(Incomplete, match=f"schedule by-hand: {reason}"):
        check_schedule(by_hand(*lists))


@pytest.mark.parametrize(
    ("lists", "reason"),
    [
        (("0F1 0F0 0B0 0B1 0U",), "worker 0 has 0F1 of step 0 before 0F0 of step 0, which must come first"),
        (("0F0 0F1 0B1 0B0 0U",), "0B1 of step 0 before 0B0"),
        (("0F0 0B0 0B1 0F1 0U",), "0B1 of step 0 before 0F1"),
        (("0F0 0F1 0B0 0U 0B1",), "0U of step 0 before 0B1"),
        (("0F0 0F1 0W0 0I0 0I1 0W1 0U",), "0W0 of step 0 before 0I0"),
        (("0F0 0F1 0I0 0I1 0W1 0W0 0U",), "0W1 of step 0 before 0W0"),
        (("0F0 0F1 0I0 0B1 0W0 0U",), "0B1 of step 0 before 0W0"),
    ],
)
def test_a_list_must_have_every_action_after_those_it_builds_on(lists: tuple[str, ...], reason: str) -> None:
    with pytest.raises(Disordered, match=reason):
        check_schedule(by_hand(*lists, microbatches=2))


@pytest.mark.parametrize(
    ("last", "reason"),
    [
        (("1F0", "1T0", "1B0", "1F1", "1B1", "1T1"), "1T0 of step 0 before 1B0"),
        (("1F0", "1B0", "1F1", "1B1", "1T0", "1T1"), "1B1 of step 0 before 1T0"),  # a stage holds those of one backward
        (("1F0", "1B0", "1T0", "1F1", "1B1", "1U", "1T1"), "1U of step 0 before 1T1"),
    ],
)
def test_gradients_of_what_stages_share_are_sent_after_each_backward(last: tuple[str, ...], reason: str) -> None:
    made = by_hand("0F0 0F1 0B0 0B1 0U", "1F0 1B0 1F1 1B1 1U", microbatches=2)
    with pytest.raises(Disordered, match=reason):
        check_schedule(reordered(compile_program(made, [TiedStages(((0, 1),))]), *last))


@pytest.mark.parametrize(
    ("last", "reason"),
    [(("1F0", "1S", "1B0", "1U"), "1S of step 0 before 1B0"), (("1F0", "1B0", "1U", "1S"), "1U of step 0 before 1S")],
)
def test_the_sums_of_a_step_are_sent_after_its_backwards_and_before_its_update(
    last: tuple[str, ...], reason: str
) -> None:
    made = compile_program(by_hand("0F0 0B0 0U", "1F0 1B0 1U"), [TiedStages(((0, 1),), "step")])
    with pytest.raises(Disordered, match=reason):
        check_schedule(reordered(made, *last))


def reordered(program: Program, *names: str) -> Program:
    """With the operations of worker 1 in another order, those that are not named last."""

    def place(op: Op) -> int:
        return names.index(op.name) if op.name in names else len(names)

    return program.with_lists(lambda worker, ops: tuple(sorted(ops, key=place)) if worker else ops)


def test_messages_that_are_not_put_in_the_order_of_their_queue_are_found() -> None:
    made = by_hand("0F0 0F1 0B0 0B1 0U", "1F0 1F1 1B0 1B1 1U", microbatches=2)
    program = compile_program(made).requeued(lambda queue: structs.replace(queue, carried=(1, 0)))
    with pytest.raises(Disordered, match=r"microbatches \[0, 1\] at backward-0, which has them in the order \[1, 0\]"):
        check_schedule(program)
