"""By which schedule a worker's steps go, as it is told, in any order and more than once."""

from collections.abc import Sequence

from stageline.broker.control.records import ScheduleOrder
from stageline.broker.queues.memory import MemoryQueues
from stageline.pipeline.program import Instruction, compile_program
from stageline.pipeline.schedule import make_schedule
from stageline.pipeline.tree import Tree
from stageline.workers.runtime.loop import WorkerLoop
from stageline.workers.runtime.orders import StepOrders
from support.programs import calls_of
from support.shapes import line

BASE = make_schedule("1f1b", line(2), 4)
PROGRAM = compile_program(BASE)
GPIPE, EAGER = ScheduleOrder(3, "gpipe"), ScheduleOrder(5, "eager-1f1b")


def orders(*known: ScheduleOrder, closed: int | None = None, start: int = 0) -> StepOrders:
    return StepOrders(known, closed, start)


def test_each_order_holds_from_its_step_until_the_next() -> None:
    of = orders(GPIPE, EAGER)
    assert [of.begin(step, PROGRAM).schedule.name for step in (0, 2, 3, 4, 5, 900)] == [
        *("1f1b", "1f1b", "gpipe", "gpipe", "eager-1f1b", "eager-1f1b")
    ]


def test_a_closed_step_is_not_begun_before_the_order_has_come() -> None:
    of = orders()
    of.begin(0, PROGRAM)
    of.learn([], 3)
    assert of.known == ((), 3)
    assert [of.is_open(step) for step in (1, 2, 3, 4)] == [True, True, False, False]
    of.learn([GPIPE], None)
    assert of.is_open(3)
    assert of.known == ((GPIPE,), None)


def test_what_is_begun_already_cannot_be_closed_any_more() -> None:
    of = orders()
    for step in range(6):
        of.begin(step, PROGRAM)
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


def test_a_step_is_begun_when_its_order_is_known_and_goes_by_it() -> None:
    queues = MemoryQueues("run")
    of, done = orders(closed=0), list[str]()

    class ActionList:
        loss = gradient_norm = None

        def carry_out(self, instruction: Instruction, received: Sequence[Tree]) -> Tree:
            done.append(str(instruction.action))
            return None

    calls = calls_of(make_schedule("1f1b", [[0, 1]], 4), 2, orders=of)
    loop = WorkerLoop(calls, 0, ActionList(), queues, run="run", incarnation=1)  # type: ignore[arg-type]
    assert not loop.poll(0)
    assert loop.doing == "waits for the broker to tell by which schedule step 0 goes"
    assert (loop.step, loop.progress.activity().waits) == (0, ())
    loop.learn([ScheduleOrder(0, "gpipe")], 1)
    while loop.poll(0):
        pass
    assert tuple(done) == tuple(map(str, make_schedule("gpipe", [[0, 1]], 4).workers[0]))
    assert loop.step == 1
    queues.close()
