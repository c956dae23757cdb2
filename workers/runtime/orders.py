"""By which schedule each step of a worker goes, as far as the broker has told, in a run that chooses its schedule.

orders known   0: 1f1b (the plan's)    6: window 7,4,1
closed         12                                        steps from there on are not begun: another order is to come
"""

from collections.abc import Iterable, Sequence

from stageline.broker.control.records import ScheduleOrder
from stageline.broker.errors import BrokerError
from stageline.pipeline.program import Program, compile_program
from stageline.pipeline.schedule import make_schedule

LONGEST = 600.0  # seconds that a worker waits for an order

Known = tuple[Sequence[ScheduleOrder], int | None]  # all orders, and the first step that waits for another one


class OrderMissing(BrokerError):
    """The broker has closed a step, and has not told the order for it."""


class FixedSchedule:
    """Orders of a run all of whose steps go by the plan's schedule: none."""

    known: Known = (), None

    def learn(self, orders: Sequence[ScheduleOrder], closed: int | None) -> None:
        """Note the broker's orders, and the first step that waits for another one; None: no step does."""

    def is_open(self, step: int) -> bool:
        """Return True if `step` may be begun."""
        return True

    def parts(self, steps: range) -> Iterable[range]:
        """Return `steps` in the parts that are begun at once."""
        return (steps,) if steps else ()

    def begin(self, step: int, base: Program) -> Program:
        """Return the program of `step`, which is begun now, in a run whose plan has the program `base`."""
        return base


class StepOrders(FixedSchedule):
    """Orders of a worker that begins at step `start` of a run that chooses its schedule.

    Args:
        orders: Those that are known.
        closed: First step that waits for another one. None: no step does.
        start: First step of the worker.
    """

    def __init__(self, orders: Sequence[ScheduleOrder], closed: int | None, start: int) -> None:
        # Read by the thread that reports, so both are replaced at once.
        self.known = tuple(orders), None if closed is None else max(closed, start)
        self._next = start  # the first step that is not begun
        self._made: tuple[int, Program] | None = None  # of the newest order that a step has gone by, by its number

    def learn(self, orders: Sequence[ScheduleOrder], closed: int | None) -> None:
        """Note the broker's orders. The broker repeats itself, so these may be older than those that are known."""
        known, before = self.known
        if len(orders) > len(known):
            known, before = tuple(orders), None
        if closed is not None and len(orders) == len(known) and before is None:
            before = max(closed, self._next)
        self.known = known, before

    def is_open(self, step: int) -> bool:
        closed = self.known[1]
        return closed is None or step < closed

    def parts(self, steps: range) -> Iterable[range]:
        return (range(step, step + 1) for step in steps)

    def begin(self, step: int, base: Program) -> Program:
        self._next = step + 1
        orders = self.known[0]
        reached = sum(order.step <= step for order in orders)
        if not reached:
            return base
        if self._made is None or self._made[0] != reached:
            self._made = reached, _reordered(base, orders[reached - 1])
        return self._made[1]


def _reordered(base: Program, order: ScheduleOrder) -> Program:
    """Return the program of `order`, compiled as `base` was. Raises `ScheduleRefused` for an order that no broker
    gives."""
    first = base.schedule
    made = make_schedule(
        order.name,
        first.placement,
        first.microbatches,
        mode=first.mode,
        window=order.window,
        first_trainable=first.first_trainable,
    )
    return compile_program(made, base.passes)
