"""Orders of the broker: in a run that chooses its schedule, that of each step as far as it is known; and pauses.

orders known   0: 1f1b (the plan's)    6: window 7,4,1
closed         12                                        steps from there on are not begun: another order is to come
held           9                                         steps from there on are not begun: the run pauses
"""

from collections.abc import Iterable, Sequence

import msgspec

from stageline.broker.control.pauses import NOT_HELD, HeldBack, Hold
from stageline.broker.control.records import ScheduleOrder
from stageline.broker.errors import BrokerError
from stageline.pipeline.program import Program, compile_program
from stageline.pipeline.schedule import make_schedule

LONGEST = 600.0  # seconds that a worker waits for an order

Known = tuple[Sequence[ScheduleOrder], int | None]  # all orders, and the first step that waits for another one


class OrderMissing(BrokerError):
    """Error that the broker did not say in time by which schedule a step goes.

    Mend: Run `stageline status`: the broker is silent or behind. Resume the run when it answers.

    Example: no schedule for step 12 from the broker within 600 s: run `stageline status`
    """

    error_code = "SL319"


class HeldSteps:
    """The newest order of the broker about a pause that a worker knows.

    Attributes:
        known: What the reports say of it. Read by the thread that reports, so it is replaced at once.
    """

    def __init__(self) -> None:
        """Begin without an order."""
        self.known = NOT_HELD

    def is_new(self, order: Hold) -> bool:
        """Return True if `order` is newer than the known one."""
        return order.number > self.known.number

    def learn(self, order: Hold, step: int | None) -> None:
        """Note a new order, by which the worker holds `step` back, and all that follow; None: nothing."""
        self.known = HeldBack(order.number, step, leaving=order.leaving)

    def stands(self) -> None:
        """Note that the worker has done all before the step that it holds back."""
        if not self.known.stands:
            self.known = msgspec.structs.replace(self.known, stands=True)


class FixedSchedule:
    """The orders of a run all of whose steps go by the plan's schedule: none.

    Attributes:
        known: Orders, and the first step that waits for another one; None if no step does.
    """

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
    """The orders to one worker of a run that chooses its schedule."""

    def __init__(self, orders: Sequence[ScheduleOrder], closed: int | None, start: int) -> None:
        """Begin before any step of the worker.

        Args:
            orders: Orders that are known.
            closed: First step that waits for another one. None: no step does.
            start: First step of the worker.
        """
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
        """Return True if `step` may be begun: it does not wait for another order."""
        closed = self.known[1]
        return closed is None or step < closed

    def parts(self, steps: range) -> Iterable[range]:
        """Yield each step of `steps` by itself, since the next one may go by another order."""
        return (range(step, step + 1) for step in steps)

    def begin(self, step: int, base: Program) -> Program:
        """Return the program of `step`, which is begun now, by the newest order that it has reached.

        The program is `base`, the plan's, if there is no such order.
        """
        self._next = step + 1
        orders = self.known[0]
        reached = sum(order.step <= step for order in orders)
        if not reached:
            return base
        if self._made is None or self._made[0] != reached:
            self._made = reached, _reordered(base, orders[reached - 1])
        return self._made[1]


def _reordered(base: Program, order: ScheduleOrder) -> Program:
    """Return the program of `order`, compiled as `base` was.

    Raises `ScheduleRefused` for an order that no broker gives.
    """
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
