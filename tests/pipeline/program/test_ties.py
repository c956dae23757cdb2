"""Stages that share parameters: which actions and queues their gradients need, and that no worker waits for ever."""

from itertools import pairwise

import pytest

from stageline.pipeline.program import Costs, Program, Tied, TiedStages, Ties, check_schedule, compile_program
from stageline.pipeline.schedule import (
    Action,
    Kind,
    Placement,
    Schedule,
    ScheduleRefused,
    make_schedule,
    schedule_names,
)
from support.shapes import accepted, by_hand, line, looped, scattered, times

SHAPES: list[Placement] = [line(2), line(4), looped(2, 2), ((0, 3), (1,), (2,)), scattered(5, 1)]


def tied(ties: Ties, schedule: Schedule, sent: Tied = "microbatch") -> Program:
    return compile_program(schedule, [TiedStages(ties, sent)])


def names(program: Program, worker: int) -> str:
    return " ".join(op.name for op in program.step[worker])


def ends(program: Program) -> dict[str, tuple[int | None, int | None]]:
    return {name: (queue.source, queue.target) for name, queue in program.queues.items()}


def test_a_stage_sends_its_gradients_right_after_each_backward() -> None:
    schedule = tied(((0, 2),), make_schedule("1f1b", line(3), 2))
    assert names(schedule, 2) == "2F0 2B0 2T0 2F1 2B1 2T1 2U"
    assert names(schedule, 0) == "0F0 0F1 0B0 0B1 0U"
    assert ends(schedule)["tied-0"] == (2, 0)
    assert ends(schedule)["total-2"] == (0, 2)


def test_gradients_are_taken_by_the_earlier_stages_backward_and_totals_by_the_later_stages_update() -> None:
    schedule = tied(((0, 2), (2, 3)), make_schedule("gpipe", line(4), 1))
    found = {op.name: (op.takes, op.gives) for op in sum(schedule.step, ())}
    assert found["0B0"] == (("backward-0", "tied-0"), ())
    assert found["2B0"] == (("backward-2", "tied-2"), ("backward-1",))
    assert [found[name] for name in ("3T0", "2T0")] == [((), ("tied-2",)), ((), ("tied-0",))]
    assert [found[name] for name in ("0U", "1U", "2U", "3U")] == [
        ((), ("total-2",)),
        ((), ()),
        (("total-2",), ("total-3",)),
        (("total-3",), ()),
    ]


def test_once_per_step_every_stage_that_shares_something_adds_up_the_last_stage_first() -> None:
    schedule = tied(((0, 2), (2, 3)), make_schedule("gpipe", ((0, 2), (1,), (3,)), 2), "step")
    assert names(schedule, 0).partition("0B1")[2] == " 2S 0S 0U 2U"
    found = {op.name: (op.takes, op.gives) for op in sum(schedule.step, ())}
    assert found["0B1"] == (("backward-0",), ())
    assert [found[name] for name in ("3S", "2S", "0S")] == [
        ((), ("subtotal-2",)),
        (("subtotal-2",), ("subtotal-0",)),
        (("subtotal-0",), ()),
    ]
    assert [found[name] for name in ("0U", "2U")] == [((), ("total-2",)), (("total-2",), ("total-3",))]


@pytest.mark.parametrize("sent", ["microbatch", "step"])
@pytest.mark.parametrize("name", [name for name in schedule_names() if name != "window"])
@pytest.mark.parametrize("placement", SHAPES, ids=str)
def test_no_schedule_deadlocks_over_what_stages_share(name: str, placement: Placement, sent: Tied) -> None:
    stages = range(sum(map(len, placement)))
    for ties in {tuple(pairwise(sharing)) for sharing in ([0, stages[-1]], stages[-2:], stages)}:
        for made in accepted(name, placement, 4):
            schedule = compile_program(made, [TiedStages(ties, sent)])
            verdict = check_schedule(schedule, steps=2)
            lower, upper = ties[0]
            assert {f"total-{upper}", f"{'tied' if sent == 'microbatch' else 'subtotal'}-{lower}"} <= {*schedule.queues}
            assert verdict.queue_bound[f"total-{upper}"] == 1
            check_schedule(schedule, steps=2, windows=verdict.queue_bound)


def test_where_backwards_have_two_halves_a_stage_that_sends_gradients_runs_them_whole() -> None:
    made = by_hand("0F0 0F1 0I0 0I1 0W0 0W1 0U", "1F0 1I0 1F1 1I1 1W0 1W1 1U", microbatches=2)
    schedule = tied(((0, 1),), made)
    assert names(schedule, 1) == "1F0 1B0 1T0 1F1 1B1 1T1 1U"
    assert next(op.takes for op in schedule.step[0] if op.name == "0W1") == ("tied-0",)
    check_schedule(schedule, steps=2)


def test_an_update_waits_for_the_earlier_stages_over_the_slowest_hop_between_them() -> None:
    schedule = tied(((0, 2),), make_schedule("1f1b", line(3), 1))
    verdict = check_schedule(schedule, Costs((1,) * 3, (1,) * 3, (1,) * 3, (1,) * 3, (2, 5)))
    _, updated = times(verdict, 0)["0U"]
    assert times(verdict, 2)["2U"] == (updated + 5, updated + 6)


def test_asynchronous_stages_cannot_share_a_parameter() -> None:
    with pytest.raises(ScheduleRefused, match=r"stages 0 and 2 share a parameter, .*; use mode = \"sync\", or cut"):
        tied(((0, 2),), make_schedule("1f1b", line(3), 1, mode="async"))


@pytest.mark.parametrize(
    ("ties", "reason"),
    [
        (((0, 2),), "stages 0 and 2 cannot share a parameter that is trained: the stages that train are 1 to 2"),
        (((2, 1),), "stages 2 and 1 cannot share"),
        (((1, 3),), "stages 1 and 3 cannot share"),
        (((1, 2), (1, 2)), "a stage has two neighbours on one side"),
    ],
)
def test_ties_that_cannot_be_are_refused(ties: tuple[tuple[int, int], ...], reason: str) -> None:
    with pytest.raises(ScheduleRefused, match=reason):
        tied(ties, make_schedule("1f1b", line(3), 1, first_trainable=1))


def test_a_stage_that_shares_nothing_with_an_earlier_one_sends_nothing() -> None:
    program = tied((), make_schedule("1f1b", line(3), 2))
    assert all(op.action.kind is not Kind.TIED for op in sum(program.step, ()))
    assert str(Action(Kind.TIED, 2, 5)) == "2T5"


def test_another_time_to_send_them_is_refused() -> None:
    with pytest.raises(ScheduleRefused, match="cannot send what they share per 'epoch'; use tied = \"microbatch\" or"):
        tied(((0, 2),), make_schedule("1f1b", line(3), 1), "epoch")  # type: ignore[arg-type]
