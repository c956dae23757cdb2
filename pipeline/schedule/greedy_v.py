"""ZB-V for stages whose F, I and W take unequally long: what is ready goes first, what is deferred fills the rest.

The list of `v_shaped.py` fits times that are equal; ZB-V's authors (arXiv 2405.15362) search an order for others. Here
a worker that is free runs what is ready, by precedence, and the gradients of weights when nothing else is ready. It has
at most 2 P microbatches in flight over its two stages, as in ZB-V, and keeps room for one on the way up, so that no two
workers wait for each other. Several precedences are tried, and that list; the shortest step wins.
"""

from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from heapq import heappop, heappush

from .action import Action, Kind, Lists
from .shape import Shape
from .v_shaped import v_shaped, zb_v

_NEVER = float("inf")

Times = tuple[float, float, float]  # of F, I and W, in one unit; each of a stage

_PRECEDENCES = ("I1 I0 F1 F0", "I0 I1 F1 F0", "F1 I1 I0 F0", "F1 I0 I1 F0", "I1 F1 I0 F0")


def timed_zb_v(shape: Shape, times: Times) -> Lists:
    """Each worker's list for one step, without updates. Raises `ScheduleRefused` if the stages form no V, or if times
    are none."""
    if min(times) <= 0:
        raise shape.refused(f"F, I and W must take some time, and are given as {', '.join(map(str, times))}")
    listed = zb_v(shape)
    found = [_VRun(shape, times, precedence.split()) for precedence in _PRECEDENCES]
    shortest = min(found, key=lambda pipeline: pipeline.span)
    return tuple(map(tuple, shortest.lists)) if shortest.span < _span(listed, times) else listed


class _VWorker:
    """What a worker has done, and what it defers."""

    def __init__(self) -> None:
        self.ran: Counter[str] = Counter()
        self.deferred: deque[Action] = deque()
        self.free = 0.0
        self.held = 0


class _VRun:
    """Runs all workers on a clock. `lists` is what each of them ran, `span` how long it took."""

    def __init__(self, shape: Shape, times: Times, precedence: Sequence[str]) -> None:
        self._shape, self._precedence = shape, precedence
        self._times: dict[str, float] = dict(zip((Kind.FORWARD, Kind.INPUT, Kind.WEIGHT), times, strict=True))
        self._stages = v_shaped(shape.workers)
        self._workers = [_VWorker() for _ in range(shape.workers)]
        self._ends: dict[Action, float] = {}
        self._moments = [(0.0, worker) for worker in range(shape.workers)]
        self.lists: list[list[Action]] = [[] for _ in range(shape.workers)]
        while self._moments:
            self._decide(*heappop(self._moments))
        self.span = max(self._ends.values())

    def _decide(self, now: float, number: int) -> None:
        worker = self._workers[number]
        if worker.free > now or (action := self._next(now, number)) is None:
            return
        worker.free = self._ends[action] = now + self._times[action.kind]
        self.lists[number].append(action)
        heappush(self._moments, (worker.free, number))
        if action.kind is not Kind.WEIGHT:
            self._pass_on(action, worker)

    def _next(self, now: float, number: int) -> Action | None:
        worker = self._workers[number]
        for turn in self._precedence:
            action = Action(Kind(turn[0]), self._stages[number][int(turn[1])], worker.ran[turn])
            if self._is_due(action, worker, turn) and self._arrived(action) <= now:
                worker.ran[turn] += 1
                return action
        if not worker.deferred:
            return None
        worker.held -= 1
        return worker.deferred.popleft()

    def _is_due(self, action: Action, worker: _VWorker, turn: str) -> bool:
        if action.microbatch == self._shape.microbatches:
            return False
        if action.kind is Kind.INPUT:
            return action.stage >= self._shape.first_trainable
        most = 2 * self._shape.workers - (2 if turn == "F0" else 1)  # before it
        return worker.held <= most

    def _arrived(self, action: Action) -> float:
        """When all that `action` needs is there; never, as long as it is not known."""
        forward = action._replace(kind=Kind.FORWARD)
        if action.kind is Kind.FORWARD:
            return self._ends.get(action._replace(stage=action.stage - 1), _NEVER) if action.stage else 0
        if action.stage == self._shape.stages - 1:
            return self._ends.get(forward, _NEVER)
        return max(self._ends.get(forward, _NEVER), self._ends.get(action._replace(stage=action.stage + 1), _NEVER))

    def _pass_on(self, action: Action, worker: _VWorker) -> None:
        trains = action.stage >= self._shape.first_trainable
        if action.kind is Kind.FORWARD:
            worker.held += trains
        else:
            worker.deferred.append(action._replace(kind=Kind.WEIGHT))
        consumer = action.stage + (1 if action.kind is Kind.FORWARD else -1)
        if 0 <= consumer < self._shape.stages:
            heappush(self._moments, (self._ends[action], min(consumer, self._shape.stages - 1 - consumer)))


def _span(lists: Lists, times: Times) -> float:
    """How long a step of these lists takes."""
    takes: dict[str, float] = dict(zip((Kind.FORWARD, Kind.INPUT, Kind.WEIGHT), times, strict=True))
    last = max(action.stage for actions in lists for action in actions)
    ends: dict[Action, float] = {}
    left, free = [deque(actions) for actions in lists], [0.0] * len(lists)
    while any(left):
        for worker, actions in enumerate(left):
            while actions and (ready := _latest(ends, _needed(actions[0], last))) < _NEVER:
                action = actions.popleft()
                free[worker] = ends[action] = max(free[worker], ready) + takes[action.kind]
    return max(free)


def _latest(ends: Mapping[Action, float], needed: Iterable[Action]) -> float:
    return max((ends.get(each, _NEVER) for each in needed), default=0)


def _needed(action: Action, last: int) -> list[Action]:
    """What must have ended before it, on other workers."""
    if action.kind is Kind.FORWARD:
        return [action._replace(stage=action.stage - 1)] if action.stage else []
    return [action._replace(stage=action.stage + 1)] if action.kind is Kind.INPUT and action.stage < last else []
