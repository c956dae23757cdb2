"""Measured steps as they would have gone otherwise: without a cause of waiting, or with a worker of another speed.

Each worker runs its actions in the order in which it ran them. An action begins when the one before it has ended and
what was paused for is over, and when its message has come.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import chain
from operator import add
from statistics import median

from stageline.broker.ledger.times import WaitCause

from .steps import PAUSES, WITHIN, MeasuredSteps, Ran

_SPIKE = 4.0  # times the usual, from where on a time is one of a hiccup
_SHARED = (WaitCause.SCRIPT, WaitCause.EVALUATION, WaitCause.SWITCHING)  # all workers wait for these at once

Hop = tuple[int, int]  # the stages from and to which a message goes


@dataclass(frozen=True, slots=True)
class Otherwise:
    """A difference from what was measured.

    Attributes:
        speed: Times of each worker's computing, in terms of the measured ones; 1 where none is given.
        without: Causes of pauses, and those within actions, that take no time.
        instant: Hops whose messages take no time.
    """

    speed: Mapping[int, float] = field(default_factory=dict)
    without: frozenset[WaitCause] = frozenset()
    instant: frozenset[Hop] = frozenset()


class Retimed:
    """The actions of some measured steps in an order in which each comes after what it waits for.

    Attributes:
        lags: Median lag of the messages of each hop, in seconds.
    """

    def __init__(self, steps: MeasuredSteps, paused: Mapping[int, Mapping[WaitCause, float]] | None = None) -> None:
        """Put the actions into order.

        Args:
            steps: Steps.
            paused: By worker, the seconds of a step that it paused for each cause over a longer time. More than in
                `steps` is added to each step: a snapshot is rarer than the steps that are looked at.
        """
        self.lags = steps.lags()
        self._count = len(steps.steps)
        order, place = _ordered(steps)
        stage_of = steps.stage_of
        self._workers = [each.worker for each in order]
        self._busy = list(map(steps.computing, order))
        self._within = {cause: [each.paused_for(cause) for each in order] for cause in WITHIN}
        self._source = [-1 if each.source is None else place[id(each.source)] for each in order]
        hops: list[Hop | None] = [
            None if each.source is None else (stage_of[each.source.action.stage], stage_of[each.action.stage])
            for each in order
        ]
        self._lag = [self._lag_of(each, hop) for each, hop in zip(order, hops, strict=True)]
        self._across: dict[Hop | None, list[int]] = defaultdict(list)
        for number, hop in enumerate(hops):
            self._across[hop].append(number)
        self._over = _usual_overhead(steps, order)
        self._pauses = _pauses(steps, order, paused or {})
        self._begins = [min((each.start for each in actions), default=0.0) for actions in steps.workers]
        self._ends = [_last_of(order, step) for step in (steps.steps[0], steps.steps[-1])] if self._count > 1 else []

    def pauses_for(self, cause: WaitCause) -> bool:
        """Return True if some worker paused for `cause`."""
        if cause in self._within:
            return any(self._within[cause])
        return any(cause in pauses for pauses in self._pauses.values())

    def seconds(self, otherwise: Otherwise | None = None) -> float:
        """Return the seconds from the end of a step to the end of the next, on average; 0 for fewer than two steps."""
        if not self._ends:
            return 0.0
        other = otherwise or Otherwise()
        free, ended = list(self._begins), list[float]()
        columns = self._workers, self._before(other), self._source, self._on_the_way(other), self._taking(other)
        for worker, before, source, lag, taking in zip(*columns, strict=True):
            start = free[worker] + before
            if source >= 0 and (arrival := ended[source] + lag) > start:
                start = arrival
            free[worker] = end = start + taking
            ended.append(end)
        first, last = (max(ended[number] for number in numbers) for numbers in self._ends)
        return (last - first) / (self._count - 1)

    def _before(self, other: Otherwise) -> list[float]:
        """Return, by action, the seconds of the loop and of pauses before it."""
        before, paused = self._over.copy(), [cause for cause in PAUSES if cause not in other.without]
        for number, pauses in self._pauses.items():
            before[number] += sum(pauses.get(cause, 0.0) for cause in paused)
        return before

    def _on_the_way(self, other: Otherwise) -> list[float]:
        """Return, by action, the seconds that its message is on its way."""
        if not other.instant:
            return self._lag
        lag = self._lag.copy()
        for number in chain.from_iterable(self._across.get(hop, ()) for hop in other.instant):
            lag[number] = 0.0
        return lag

    def _taking(self, other: Otherwise) -> list[float]:
        """Return, by action, the seconds from its start to its end."""
        taking = self._busy
        if other.speed:
            speed = [other.speed.get(worker, 1.0) for worker in range(len(self._begins))]
            taking = [busy * speed[worker] for busy, worker in zip(taking, self._workers, strict=True)]
        for cause, seconds in self._within.items():
            taking = taking if cause in other.without else list(map(add, taking, seconds))
        return taking

    def _lag_of(self, each: Ran, hop: Hop | None) -> float:
        """Return the lag of a message; of one that was not waited for, that of others, as far as that can be."""
        if each.source is None or hop is None or each.source.worker == each.worker:
            return 0.0
        usual = self.lags.get(hop, 0.0)
        if each.lag is not None:
            return min(each.lag, _SPIKE * usual)
        return min(usual, max(0.0, each.start - each.source.end))


def _last_of(order: Iterable[Ran], step: int) -> list[int]:
    """Return the place in `order` of each worker's last action of a step."""
    return list({each.worker: number for number, each in enumerate(order) if each.step == step}.values())


def _ordered(steps: MeasuredSteps) -> tuple[list[Ran], dict[int, int]]:
    """Return all actions, each after the one before it on its worker and after the one whose message it takes.

    Returns:
        The actions, and the place of each of them by its identity.
    """
    place: dict[int, int] = {}
    placed: list[Ran] = []
    reached = [0] * len(steps.workers)
    total = len(steps.all)
    while len(placed) < total:
        before = len(placed)
        for worker, actions in enumerate(steps.workers):
            at = reached[worker]
            while at < len(actions) and ((source := actions[at].source) is None or id(source) in place):
                place[id(actions[at])] = len(placed)
                placed.append(actions[at])
                at += 1
            reached[worker] = at
        if len(placed) == before:  # a clock that is off: go on with what began first
            worker = min(
                (index for index, actions in enumerate(steps.workers) if reached[index] < len(actions)),
                key=lambda index: steps.workers[index][reached[index]].start,
            )
            steps.workers[worker][reached[worker]].takes_from(None)
    return placed, place


def _usual_overhead(steps: MeasuredSteps, order: Iterable[Ran]) -> list[float]:
    """Return, by action, the time before it that the loop itself takes, without hiccups."""
    usual = [median([each.over for each in actions] or [0.0]) for actions in steps.workers]
    return [min(each.over, _SPIKE * usual[each.worker] + 1e-4) for each in order]


def _pauses(
    steps: MeasuredSteps, order: Iterable[Ran], paused: Mapping[int, Mapping[WaitCause, float]]
) -> dict[int, dict[WaitCause, float]]:
    """Return the pauses before the actions that have some, by place in `order`.

    What all workers wait for at once counts as long as the shortest wait.
    """
    shortest, more = _shortest(steps), _beyond(steps, paused)
    found, begun = dict[int, dict[WaitCause, float]](), set[tuple[int, int]]()
    for number, each in enumerate(order):
        is_first = (each.worker, each.step) not in begun
        if not (is_first or each.pauses):
            continue
        pauses = {cause: seconds for cause, seconds in each.pauses.items() if cause not in _SHARED}
        if is_first:
            begun.add((each.worker, each.step))
            pauses |= {cause: shortest[each.step, cause] for cause in _SHARED}
            for cause, seconds in more.get(each.worker, {}).items():
                pauses[cause] = pauses.get(cause, 0.0) + seconds
        if kept := {cause: seconds for cause, seconds in pauses.items() if seconds}:
            found[number] = kept
    return found


def _shortest(steps: MeasuredSteps) -> dict[tuple[int, WaitCause], float]:
    """Return by step, for each cause for which all workers wait at once, the shortest that one of them did."""
    waited = {(step, cause): [0.0] * len(steps.workers) for step in steps.steps for cause in _SHARED}
    for each in steps.all:
        for cause, seconds in each.pauses.items():
            if cause in _SHARED:
                waited[each.step, cause][each.worker] += seconds
    return {key: min(of) for key, of in waited.items()}


def _beyond(steps: MeasuredSteps, paused: Mapping[int, Mapping[WaitCause, float]]) -> dict[int, dict[WaitCause, float]]:
    """Return how much longer each worker paused in a step than in these steps, by cause."""
    count, found = max(1, len(steps.steps)), dict[int, dict[WaitCause, float]]()
    for worker, actions in enumerate(steps.workers):
        pausing = [each.pauses for each in actions if each.pauses]
        for cause, seconds in paused.get(worker, {}).items():
            here = sum(pauses.get(cause, 0.0) for pauses in pausing) / count
            found.setdefault(worker, {})[cause] = max(0.0, seconds - here)
    return found
