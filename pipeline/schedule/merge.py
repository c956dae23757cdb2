"""Merges the lists of stages on one worker, by the time at which each action would start on a worker of its own.

This works for any placement: neighbours on one worker, a U (first and last stage together), four stages on three
workers. All workers follow one order in time, in which nothing starts before its data, so they cannot deadlock.

In asynchronous mode, microbatches are numbered over the whole run here.
"""

import sys
from collections import deque
from collections.abc import Iterator, Sequence

from .action import Action, Kind

_COST: dict[str, int] = {
    Kind.FORWARD: 1,
    Kind.BACKWARD: 2,
    Kind.INPUT: 1,
    Kind.WEIGHT: 1,
}  # costs that are assumed before a run; messages take no time


def merge(lists: Sequence[Iterator[Action]], first_trainable: int, ahead: int = sys.maxsize) -> Iterator[Action]:
    """All actions of all stages' lists in the order of their start. A stage below `first_trainable`, which waits for no
    gradient, is at most `ahead` microbatches ahead of the next one.

    Of actions that start at once a backward goes first, its second half last; then the lower number, then the later
    stage.
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
        forward = (f"forward-{stage}" for stage in range(1, stages))
        backward = (f"backward-{stage}" for stage in range(first_trainable, stages - 1))
        self._arrivals: dict[str, deque[int]] = {queue: deque() for queue in (*forward, *backward)}

    def start(self, action: Action) -> int | None:
        """When `action` can start; None until the message that it needs has been sent, and while its stage is as far
        ahead of the next one as it may be."""
        if action.stage < self._unlimited and len(self._arrivals.get(action.outbound, ())) >= self._ahead:
            return None
        free = self._free[action.stage]
        arrivals = self._arrivals.get(action.inbound)
        if arrivals is None:
            return free
        return max(free, arrivals[0]) if arrivals else None

    def run(self, start: int, action: Action) -> None:
        """Runs `action` at `start`: takes its message, and sends its result."""
        self._free[action.stage] = start + _COST[action.kind]
        if action.inbound in self._arrivals:
            self._arrivals[action.inbound].popleft()
        if action.outbound in self._arrivals:
            self._arrivals[action.outbound].append(self._free[action.stage])


_URGENCY: dict[str, int] = {Kind.BACKWARD: 0, Kind.INPUT: 0, Kind.FORWARD: 1, Kind.WEIGHT: 2}


def _precedence(candidate: tuple[int, Action]) -> tuple[int, int, int, int]:
    start, action = candidate
    return start, _URGENCY[action.kind], action.microbatch, -action.stage
