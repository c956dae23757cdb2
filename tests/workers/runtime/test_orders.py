"""By which schedule a worker's steps go, as it is told, in any order and more than once."""

from stageline.broker.control.records import ScheduleOrder
from stageline.pipeline.program import compile_program
from stageline.pipeline.schedule import make_schedule
from stageline.workers.runtime.machine import AwaitOrder, Compute, Machine, Take
from stageline.workers.runtime.orders import StepOrders
from support.programs import calls_of
from support.shapes import line

BASE = make_schedule("1f1b", line(2), 4)
GPIPE, EAGER = ScheduleOrder(3, "gpipe"), ScheduleOrder(5, "eager-1f1b")


def orders(*known: ScheduleOrder, closed: int | None = None, start: int = 0) -> StepOrders:
    return StepOrders(compile_program(BASE), known, closed, start)


def test_each_order_holds_from_its_step_until_the_next() -> None:
    of = orders(GPIPE, EAGER)
    assert [of.begin(step).schedule.name for step in (0, 2, 3, 4, 5, 900)] == [
        *("1f1b", "1f1b", "gpipe", "gpipe", "eager-1f1b", "eager-1f1b")
    ]


def test_a_closed_step_is_not_begun_before_the_order_has_come() -> None:
    of = orders()
    of.begin(0)
    of.learn([], 3)
    assert of.known == ((), 3)
    assert [of.is_open(step) for step in (1, 2, 3, 4)] == [True, True, False, False]
    of.learn([GPIPE], None)
    assert of.is_open(3)
    assert of.known == ((GPIPE,), None)


def test_what_is_begun_already_cannot_be_closed_any_more() -> None:
    of = orders()
    for step in range(6):
        of.begin(step)
    of.learn([], 3)
    assert of.known[1] == 6


def test_what_was_told_before_changes_nothing_when_it_comes_again() -> None:
    of = orders(GPIPE)
    of.learn([GPIPE], 7)
    for late in ([], [GPIPE]):
        of.learn(late, 1)
        of.learn(late, None)
    assert of.known == ((GPIPE,), 7)


def test_a_worker_that_begins_at_a_checkpoint_closes_no_step_before_it() -> None:
    assert orders(closed=3, start=10).known[1] == 10


def test_the_instructions_of_a_step_are_made_when_its_order_is_known() -> None:
    of = orders()
    walked = Machine(calls_of(BASE, 2).instructions(0, 0, of))
    assert isinstance(walked.command, AwaitOrder)
    of.learn([ScheduleOrder(0, "gpipe")], None)
    done = []
    command = walked.ordered()
    while not isinstance(command, AwaitOrder):
        if isinstance(command, Take):
            command = walked.arrived(command.queue, 0, command.instruction.action.microbatch)
        else:
            assert isinstance(command, Compute)
            done.append(command.instruction.action)
            command = walked.computed()
    assert tuple(done) == make_schedule("gpipe", line(2), 4).workers[0]
    assert command.instruction.step == 1
