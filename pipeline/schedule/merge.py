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
    clock = _Clock(len(lists), first_trainable)
    heads = [next(turns, None) for turns in lists]
    while ready := [(start, turn) for turn in heads if turn and (start := clock.start(turn)) is not None]:
        start, turn = min(ready, key=_precedence)
        clock.run(start, turn)
        heads[turn.stage] = next(lists[turn.stage], None)
        yield turn


class _Clock:
    """When each stage is free, and when the messages arrived that it has not used yet."""

    def __init__(self, stages: int, first_trainable: int) -> None:
        self._free = [0] * stages
        forward = ((Kind.FORWARD, stage) for stage in range(1, stages))
        backward = ((Kind.BACKWARD, stage) for stage in range(first_trainable, stages - 1))
        self._arrivals: dict[tuple[Kind, int], deque[int]] = {queue: deque() for queue in (*forward, *backward)}

    def start(self, turn: Turn) -> int | None:
        """When `turn` can start; None until the message that it needs has been sent."""
        free = self._free[turn.stage]
        arrivals = self._arrivals.get((turn.kind, turn.stage))
        if arrivals is None:
            return free
        return max(free, arrivals[0]) if arrivals else None

    def run(self, start: int, turn: Turn) -> None:
        """Runs `turn` at `start`: takes its message, and sends its result."""
        self._free[turn.stage] = start + _COST[turn.kind]
        if (turn.kind, turn.stage) in self._arrivals:
            self._arrivals[turn.kind, turn.stage].popleft()
        consumer = turn.stage + 1 if turn.kind is Kind.FORWARD else turn.stage - 1
        if (turn.kind, consumer) in self._arrivals:
            self._arrivals[turn.kind, consumer].append(self._free[turn.stage])


def _precedence(candidate: tuple[int, Turn]) -> tuple[int, bool, int]:
    start, turn = candidate
    return start, turn.kind is not Kind.BACKWARD, turn.number
