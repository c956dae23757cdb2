"""Merges the lists of stages on one worker, by the time at which each action would start on a worker of its own.

This works for any placement: neighbours on one worker, a U (first and last stage together), four stages on three
workers. All workers follow one order in time, in which nothing starts before its data, so they cannot deadlock.

Here an action's microbatch is its step where each step is one microbatch.
"""

import sys
from collections import deque
from collections.abc import Iterator, Sequence

from .action import Action, Kind

_COST = {Kind.FORWARD: 1, Kind.BACKWARD: 2}  # costs that are assumed before a run; messages take no time


def merge(lists: Sequence[Iterator[Action]], first_trainable: int, ahead: int = sys.maxsize) -> Iterator[Action]:
    """All actions of all stages' lists in the order of their start. A stage below `first_trainable`, which waits for no
    gradient, is at most `ahead` microbatches ahead of the next one.

    Of actions that start at once a backward goes first, then the lower number. Nothing else can tie: a microbatch is
    never at two stages at once.
    """
    clock = _Clock(len(lists), first_trainable, ahead)
    heads = [next(actions, None) for actions in lists]
    while ready := [(start, action) for action in heads if action and (start := clock.start(action)) is not None]:
        start, action = min(ready, key=_precedence)
        clock.run(start, action)
        heads[action.stage] = next(lists[action.stage], None)
        yield action


class _Clock:
    """When each stage is free, and when the messages arrived that it has not used yet."""

    def __init__(self, stages: int, first_trainable: int, ahead: int) -> None:
        self._free = [0] * stages
        self._unlimited, self._ahead = first_trainable, ahead
        forward = ((Kind.FORWARD, stage) for stage in range(1, stages))
        backward = ((Kind.BACKWARD, stage) for stage in range(first_trainable, stages - 1))
        self._arrivals: dict[tuple[Kind, int], deque[int]] = {queue: deque() for queue in (*forward, *backward)}

    def start(self, action: Action) -> int | None:
        """When `action` can start; None until the message that it needs has been sent, and while its stage is as far
        ahead of the next one as it may be."""
        if (
            action.stage < self._unlimited
            and len(self._arrivals.get((Kind.FORWARD, action.stage + 1), ())) >= self._ahead
        ):
            return None
        free = self._free[action.stage]
        arrivals = self._arrivals.get((action.kind, action.stage))
        if arrivals is None:
            return free
        return max(free, arrivals[0]) if arrivals else None

    def run(self, start: int, action: Action) -> None:
        """Runs `action` at `start`: takes its message, and sends its result."""
        self._free[action.stage] = start + _COST[action.kind]
        if (action.kind, action.stage) in self._arrivals:
            self._arrivals[action.kind, action.stage].popleft()
        consumer = action.stage + 1 if action.kind is Kind.FORWARD else action.stage - 1
        if (action.kind, consumer) in self._arrivals:
            self._arrivals[action.kind, consumer].append(self._free[action.stage])


def _precedence(candidate: tuple[int, Action]) -> tuple[int, bool, int]:
    start, action = candidate
    return start, action.kind is not Kind.BACKWARD, action.microbatch
