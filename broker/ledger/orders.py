"""By which schedule each step of a run goes that chooses its schedules: orders, each from a step on until the next.

    orders     0: 1f1b (the plan's)    6: window 7,4,1              940: window 12,7,1
    steps      0 ... 5                 6 ... 939                    940 ...

An order comes about in two parts, so that no two workers ever go through a step by different lists. First its step is
closed: workers do not begin it, and say which step is the first that each has closed, since one may have begun a later
step already. The last of those is the order's step. Both parts are stored before any worker is told.
"""

from collections.abc import Iterable, Mapping, Sequence

import msgspec

from stageline.broker.control.messages import Report, ScheduleOrders
from stageline.broker.control.records import ScheduleOrder
from stageline.broker.control.store import Fact
from stageline.pipeline.choice import ChosenSchedule

_FACT = "orders"  # its name in a store


class ProposedOrder(msgspec.Struct, frozen=True):
    """The next order, whose step has yet to be agreed on: `closed` or a later one. `why`: for people."""

    name: str
    window: tuple[int, ...] | None
    closed: int
    why: str = ""


class OrderBook(msgspec.Struct):
    """The orders so far, why each was given, the one that is to come, and the newest review."""

    orders: list[ScheduleOrder] = []
    reasons: list[str] = []
    proposed: ProposedOrder | None = None
    review: ChosenSchedule | None = None

    @classmethod
    def stored_in(cls, facts: Mapping[str, Fact]) -> "OrderBook":
        """Return the book among a store's `facts`; an empty one if there is none."""
        return msgspec.convert(facts[_FACT], cls) if facts.get(_FACT) else cls()

    def fact(self) -> tuple[str, Fact]:
        """Return the book for a store, with its name there."""
        return _FACT, msgspec.to_builtins(self, order="deterministic")

    @property
    def closed(self) -> int | None:
        """The step that workers do not begin before they know the next order."""
        return None if self.proposed is None else self.proposed.closed

    @property
    def message(self) -> ScheduleOrders:
        return ScheduleOrders(tuple(self.orders), self.closed)

    def lacking(self, report: Report) -> str:
        """Return what of the orders a worker knows that this book does not have, "" for nothing."""
        known = report.orders > len(self.orders)
        return "a worker knows of a schedule that the broker's records do not have" if known else ""

    def note_review(self, chosen: ChosenSchedule) -> None:
        """Keep what the newest review came to."""
        self.review = chosen

    def propose(self, name: str, window: tuple[int, ...] | None, closed: int, why: str) -> None:
        """Begin the next order, from step `closed` or a later one on, which has yet to be agreed on."""
        self.proposed = ProposedOrder(name, window, closed, why)

    def agreed(self, closed: Iterable[int]) -> None:
        """Let the proposed order hold: every worker has closed a step, and it holds from the last of those on."""
        if self.proposed is not None:
            self.orders = [*self.orders, ScheduleOrder(max(closed), self.proposed.name, self.proposed.window)]
            self.reasons = [*self.reasons, self.proposed.why]
            self.proposed = None

    def learn(self, known: Iterable[Sequence[ScheduleOrder]]) -> bool:
        """Take the orders that workers know, each the first so many: the records were lost, or are stale.

        Returns True if there are any, and not fewer than in this book.
        """
        orders = max(known, key=len, default=())
        if not orders or len(orders) < len(self.orders):
            return False
        self.orders, self.proposed = list(orders), None
        self.reasons = (self.reasons + [""] * len(orders))[: len(orders)]
        return True
