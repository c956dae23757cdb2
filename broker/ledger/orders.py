"""The orders of a run that chooses its schedules: each holds from a step on until the next.

    orders     0: 1f1b (the plan's)    6: window 7,4,1              940: window 12,7,1
    steps      0 ... 5                 6 ... 939                    940 ...

An order comes about in two parts, so that no two workers ever run a step by different schedules. First its step is
closed: workers do not begin it, and each reports the first step that it has closed, since it may have begun a later
step already. The last of those is the order's step. Both parts are stored before any worker is told.
"""

from collections.abc import Iterable, Mapping, Sequence

import msgspec

from stageline.broker.control.messages import ScheduleOrders
from stageline.broker.control.records import ScheduleOrder
from stageline.broker.control.store import Fact
from stageline.pipeline.choice import ChosenSchedule

_FACT = "orders"  # its name in a store


class ProposedOrder(msgspec.Struct, frozen=True):
    """The next order, for step `closed` or a later one, which has yet to be agreed on.

    `why` is the reason, for people.
    """

    name: str
    window: tuple[int, ...] | None
    closed: int
    why: str = ""


class OrderBook(msgspec.Struct):
    """A run's orders so far with the reason for each, the proposed order, and the newest review."""

    orders: list[ScheduleOrder] = []
    reasons: list[str] = []
    proposed: ProposedOrder | None = None
    review: ChosenSchedule | None = None

    @classmethod
    def stored_in(cls, facts: Mapping[str, Fact]) -> "OrderBook":
        """Return the book among a store's `facts`, or an empty one if there is none."""
        return msgspec.convert(facts[_FACT], cls) if facts.get(_FACT) else cls()

    def fact(self) -> tuple[str, Fact]:
        """Return the book as a fact for a store, with its name there."""
        return _FACT, msgspec.to_builtins(self, order="deterministic")

    @property
    def closed(self) -> int | None:
        """The step that workers do not begin before they know the next order; None without a proposed order."""
        return None if self.proposed is None else self.proposed.closed

    @property
    def message(self) -> ScheduleOrders:
        """The message that tells workers all orders, and the closed step."""
        return ScheduleOrders(tuple(self.orders), self.closed)

    def note_review(self, chosen: ChosenSchedule) -> None:
        """Keep the result of the newest review."""
        self.review = chosen

    def propose(self, name: str, window: tuple[int, ...] | None, closed: int, why: str) -> None:
        """Propose the next order, from step `closed` or a later one on.

        Args:
            name: The schedule's name.
            window: The schedule's window; None if it has none.
            closed: The first step that workers do not begin before the order is agreed on.
            why: The reason, for people.
        """
        self.proposed = ProposedOrder(name, window, closed, why)

    def agreed(self, closed: Iterable[int]) -> None:
        """Put the proposed order into effect from the last of the steps `closed`, one of each worker.

        Does nothing if no order is proposed.
        """
        if self.proposed is not None:
            self.orders = [*self.orders, ScheduleOrder(max(closed), self.proposed.name, self.proposed.window)]
            self.reasons = [*self.reasons, self.proposed.why]
            self.proposed = None

    def learn(self, known: Iterable[Sequence[ScheduleOrder]]) -> bool:
        """Take over the longest list of orders that workers know: the records were lost, or are stale.

        Returns True if there are orders, and not fewer than in this book; otherwise changes nothing.
        """
        orders = max(known, key=len, default=())
        if not orders or len(orders) < len(self.orders):
            return False
        self.orders, self.proposed = list(orders), None
        self.reasons = (self.reasons + [""] * len(orders))[: len(orders)]
        return True
