"""Merges the lists of stages on one worker, by the time at which each action would start on a worker of its own.

This works for any placement: neighbours on one worker, a U (first and last stage together), four stages on three
workers. All workers follow one order in time, in which nothing starts before its data, so they cannot deadlock.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from .action import Kind


class Turn(NamedTuple):
    """A stage's next action: `number` is its microbatch, or its step where each step is one microbatch."""

    kind: Kind
    stage: int
    number: int


_COST = {Kind.FORWARD: 1, Kind.BACKWARD: 2}  # costs that are assumed before a run; messages take no time


def merge(lists: Sequence[Iterator[Turn]], first_trainable: int) -> Iterator[Turn]:
    """All turns of all stages' lists in the order of their start.

    Of turns that start at once a backward goes first, then the lower number. Nothing else can tie: a microbatch is
    never at two stages at once.
    """
    clock = _Clock(lists, first_trainable)
    while (turn := clock.next_turn()) is not None:
        yield turn


class _Clock:
    """When each stage is free, and when the messages arrived that it has not used yet."""

    def __init__(self, lists: Sequence[Iterator[Turn]], first_trainable: int) -> None:
        self._lists = lists
        self._heads = {stage: head for stage, turns in enumerate(lists) if (head := next(turns, None)) is not None}
        self._free = [0] * len(lists)
        forward = ((Kind.FORWARD, stage) for stage in range(1, len(lists)))
        backward = ((Kind.BACKWARD, stage) for stage in range(first_trainable, len(lists) - 1))
        self._arrivals: dict[tuple[Kind, int], deque[int]] = {queue: deque() for queue in (*forward, *backward)}

    def next_turn(self) -> Turn | None:
        """Runs the turn that starts next and returns it; None at the end of all lists."""
        starts = [(start, head) for head in self._heads.values() if (start := self._start(head)) is not None]
        if not starts:
            return None
        start, turn = min(starts, key=_precedence)
        self._run(start, turn)
        return turn

    def _start(self, turn: Turn) -> int | None:
        free = self._free[turn.stage]
        arrivals = self._arrivals.get((turn.kind, turn.stage))
        if arrivals is None:
            return free
        return max(free, arrivals[0]) if arrivals else None

    def _run(self, start: int, turn: Turn) -> None:
        self._free[turn.stage] = start + _COST[turn.kind]
        self._take(turn)
        self._put(turn)
        self._advance(turn.stage)

    def _take(self, turn: Turn) -> None:
        arrivals = self._arrivals.get((turn.kind, turn.stage))
        if arrivals is not None:
            arrivals.popleft()

    def _put(self, turn: Turn) -> None:
        consumer = turn.stage + 1 if turn.kind is Kind.FORWARD else turn.stage - 1
        arrivals = self._arrivals.get((turn.kind, consumer))
        if arrivals is not None:
            arrivals.append(self._free[turn.stage])

    def _advance(self, stage: int) -> None:
        head = next(self._lists[stage], None)
        if head is None:
            del self._heads[stage]
        else:
            self._heads[stage] = head


def _precedence(candidate: tuple[int, Turn]) -> tuple[int, bool, int]:
    start, turn = candidate
    return start, turn.kind is not Kind.BACKWARD, turn.number
