"""By which schedule each step of a worker goes, as far as the broker has told, in a run that chooses its schedule.

orders known   0: 1f1b (the plan's)    6: window 7,4,1
closed         12                                        steps from there on are not begun: another order is to come
"""

from collections.abc import Sequence

from stageline.broker.control.records import ScheduleOrder
from stageline.broker.errors import BrokerError
from stageline.pipeline.program import Program, compile_program
from stageline.pipeline.schedule import make_schedule

LONGEST = 600.0  # seconds that a worker waits for an order


class OrderMissing(BrokerError):
    """The broker has closed a step, and has not told the order for it."""


class StepOrders:
    """Of a worker that begins at step `start` of a run that begins with `base`. `known`: all orders, and the first step
    that it does not begin before it knows the next one; None: it waits for none."""

    def __init__(self, base: Program, orders: Sequence[ScheduleOrder], closed: int | None, start: int) -> None:
        # Read by the thread that reports, so both are replaced at once.
        self.known: tuple[Sequence[ScheduleOrder], int | None] = (
            tuple(orders),
            None if closed is None else max(closed, start),
        )
        self._base = base
        self._next = start  # the first step that is not begun
        self._made: tuple[int, Program] = 0, base  # how many orders it follows

    def learn(self, orders: Sequence[ScheduleOrder], closed: int | None) -> None:
        """What the broker has told. It repeats itself, so it may be older than what is known."""
        known, before = self.known
        if len(orders) > len(known):
            known, before = tuple(orders), None
        if closed is not None and len(orders) == len(known) and before is None:
            before = max(closed, self._next)
        self.known = known, before

    def is_open(self, step: int) -> bool:
        """Whether `step` may be begun."""
        closed = self.known[1]
        return closed is None or step < closed

    def begin(self, step: int) -> Program:
        """The program of `step`, which is begun now."""
        self._next = step + 1
        orders = self.known[0]
        reached = sum(order.step <= step for order in orders)
        if self._made[0] != reached:
            self._made = reached, _reordered(self._base, orders[reached - 1])
        return self._made[1]


def _reordered(base: Program, order: ScheduleOrder) -> Program:
    """Returns the program of `order`, compiled as `base` was. Raises `ScheduleRefused` for an order that no broker
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
