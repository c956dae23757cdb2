"""Bounds on the time of combinations, by which most are left out early: a knapsack's, with a price on memory.

At any price of a byte, taking of each stage the option with the least time and price together, less the price of all
memory there is, is no dearer than the best that fits (Lagrangian relaxation: Fisher, Management Science 27, 1981).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce

from .load import Loads, Options, StageLoad, StageOption, WorkerRoom, beside, fit, foreseen_within

_PRICES = (0.0, *(2.0 ** (power / 2) for power in range(-60, 40)))  # nanoseconds for a byte
_ROUNDING = 1.000001  # of sums of floats


@dataclass(frozen=True, slots=True)
class Bounds:
    """`known`: the nanoseconds of a combination that fits, None if none is known; `price`: that of a byte by which most
    can be left out; `room`: how many bytes stages may hold on all workers with a limit."""

    known: int | None
    price: float
    room: dict[int, int]

    @classmethod
    def of(cls, stages: Sequence[Options], workers: Sequence[WorkerRoom]) -> "Bounds":
        owners = sorted({worker for options in stages for worker in options[0].loads})
        limits = {worker: workers[worker].limit for worker in owners}
        room = {
            worker: foreseen_within(limit) - workers[worker].messages
            for worker, limit in limits.items()
            if limit is not None
        }
        prices = [cls(None, price, room) for price in _PRICES]
        best = max(prices, key=lambda each: each.least(0, {}, stages))
        fitting = [each.nanoseconds_at(stages) for each in prices if fit(each.loads_at(stages), workers)]
        return cls(min(fitting, default=None), best.price, room)

    def may_be_cheapest(self, nanoseconds: int, loads: Loads, rest: Sequence[Options]) -> bool:
        """Whether a combination with these `loads`, of all stages but the `rest`, may become the cheapest that fits."""
        return self.known is None or self.least(nanoseconds, loads, rest) <= self.known * _ROUNDING + 1

    def least(self, nanoseconds: int, loads: Loads, rest: Sequence[Options]) -> float:
        """What it takes at least with all stages."""
        left = sum(room - loads.get(worker, StageLoad()).held for worker, room in self.room.items())
        priced = sum(min(map(self._priced, options)) for options in rest)
        return nanoseconds + priced - self.price * left

    def nanoseconds_at(self, stages: Sequence[Options]) -> int:
        return sum(option.nanoseconds for option in self._taken(stages))

    def loads_at(self, stages: Sequence[Options]) -> Loads:
        """At this price, what workers take with the options that are best at it."""
        return reduce(beside, (option.loads for option in self._taken(stages)), {})

    def _taken(self, stages: Sequence[Options]) -> list[StageOption]:
        return [min(options, key=self._priced) for options in stages]

    def _priced(self, option: StageOption) -> float:
        held = sum(load.held for worker, load in option.loads.items() if worker in self.room)
        return option.nanoseconds + self.price * held
