"""Several stages on one worker: their lists are merged by running all workers on a clock that knows only F=1 and B=2.

Any placement can be merged so: neighbours on one worker, a U (first and last stage together), four stages on three
workers. What was once run to its end, however crudely timed, cannot deadlock.
"""

from collections import deque
from collections.abc import Iterator, Sequence

from .action import Action, Kind

Run = tuple[int, Action]  # an action, after the step it belongs to

_COST = {Kind.FORWARD: 1, Kind.BACKWARD: 2, Kind.UPDATE: 0}
_FIRST_OF_TIED = (Kind.UPDATE, Kind.BACKWARD, Kind.FORWARD)


def merge(
    lists: Sequence[Iterator[Run]], placement: Sequence[Sequence[int]], first_trainable: int
) -> Iterator[tuple[int, Run]]:
    """Every action of every stage's list in the order of their start, each after the worker that runs it.

    A worker starts whichever of its stages' next actions can start first; of those that can start at once a backward
    goes first, then the lower microbatch, then the higher stage.
    """
    clock = _Clock(lists, placement, first_trainable)
    while (turn := clock.turn()) is not None:
        yield turn


class _Clock:
    """When each worker is free and when each message arrived, as far as the actions run so far tell."""

    def __init__(
        self, lists: Sequence[Iterator[Run]], placement: Sequence[Sequence[int]], first_trainable: int
    ) -> None:
        self._owner = {stage: worker for worker, stages in enumerate(placement) for stage in stages}
        self._lists = lists
        self._heads = {stage: head for stage, runs in enumerate(lists) if (head := next(runs, None)) is not None}
        self._free = [0] * len(placement)
        forward = ((Kind.FORWARD, stage) for stage in range(1, len(lists)))
        backward = ((Kind.BACKWARD, stage) for stage in range(first_trainable, len(lists) - 1))
        self._arrivals: dict[tuple[Kind, int], deque[int]] = {queue: deque() for queue in (*forward, *backward)}

    def turn(self) -> tuple[int, Run] | None:
        """Runs the action that starts next; None when all lists are at their end."""
        starts = [(start, head) for head in self._heads.values() if (start := self._start(head[1])) is not None]
        if not starts:
            return None
        start, head = min(starts, key=_precedence)
        self._run(start, head[1])
        return self._owner[head[1].stage], head

    def _start(self, action: Action) -> int | None:
        free = self._free[self._owner[action.stage]]
        arrivals = self._arrivals.get((action.kind, action.stage))
        if arrivals is None:
            return free
        return max(free, arrivals[0]) if arrivals else None

    def _run(self, start: int, action: Action) -> None:
        end = start + _COST[action.kind]
        self._free[self._owner[action.stage]] = end
        self._take(action)
        self._put(action, end)
        self._advance(action.stage)

    def _take(self, action: Action) -> None:
        arrivals = self._arrivals.get((action.kind, action.stage))
        if arrivals is not None:
            arrivals.popleft()

    def _put(self, action: Action, end: int) -> None:
        consumer = action.stage + 1 if action.kind is Kind.FORWARD else action.stage - 1
        arrivals = self._arrivals.get((action.kind, consumer))
        if arrivals is not None:
            arrivals.append(end)

    def _advance(self, stage: int) -> None:
        head = next(self._lists[stage], None)
        if head is None:
            del self._heads[stage]
        else:
            self._heads[stage] = head


def _precedence(candidate: tuple[int, Run]) -> tuple[int, int, int, int, int]:
    start, (step, action) = candidate
    return start, _FIRST_OF_TIED.index(action.kind), step, action.microbatch, -action.stage
