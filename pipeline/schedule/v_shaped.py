"""Schedules over a V: worker r of P owns stage r on the way down and stage 2 P - 1 - r on the way up.

The last stage lies on worker 0, so a microbatch's backward begins where its forward did, and all workers hold equally
many microbatches. Two of these schedules are given as lists, which are torch's:

    zb-v         ZB-V (arXiv 2405.15362): no bubble but the way down, if F, I and W take equally long
    dualpipe-v   DualPipeV (DeepSeek-V3's report and repository): forwards and backwards in pairs of opposite direction

    worker 0  0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0I0 0W0 ...        two workers, ZB-V
    worker 1  ... 1F0 2F0 1F1 2I0 2W0 ...

In a list, `F0` is the next forward of the worker's first stage, `I1` the next input gradient of its second one. A
backward of a pair comes right after the forward: nothing computes two actions at once here.

**Unequal times.** The list of ZB-V fits times that are equal; its authors search an order for others. Here a worker
that is free runs what is ready, by precedence, and the gradients of weights when nothing else is ready. It has at most
2 P microbatches in flight over its two stages, as in ZB-V, and keeps room for one on the way up, so that no two workers
wait for each other. Several precedences are tried, and that list; the shortest step wins.
"""

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from heapq import heappop, heappush

from .action import Action, Kind, Lists
from .shape import Shape

_NEVER = float("inf")

Times = tuple[float, float, float]  # of F, I and W, in one unit; each of a stage

_TIMED: tuple[str, ...] = (Kind.FORWARD, Kind.INPUT, Kind.WEIGHT)
_PRECEDENCES = ("I1 I0 F1 F0", "I0 I1 F1 F0", "F1 I1 I0 F0", "F1 I0 I1 F0", "I1 F1 I0 F0")


def zb_v(shape: Shape) -> Lists:
    """Return each worker's list for one step of ZB-V, without updates.

    Raises:
        ScheduleRefused: The stages form no V over the workers.
    """
    check_v_shaped(shape)
    return tuple(tuple(_zb_v(shape, worker).actions) for worker in range(shape.workers))


def dualpipe_v(shape: Shape) -> Lists:
    """Return each worker's list for one step of DualPipeV, without updates.

    Raises:
        ScheduleRefused: The stages form no V over the workers, or there are less than two microbatches for each worker.
    """
    check_v_shaped(shape)
    if shape.microbatches < 2 * shape.workers:
        raise shape.refused(
            f"it needs at least two microbatches for each worker, to have pairs; use {2 * shape.workers} or more, "
            f"or zb-v"
        )
    return tuple(tuple(_dualpipe_v(shape, worker).actions) for worker in range(shape.workers))


def v_shaped(workers: int) -> tuple[tuple[int, int], ...]:
    """Return the stages of each worker in a V over `workers` workers."""
    return tuple((worker, 2 * workers - 1 - worker) for worker in range(workers))


def check_v_shaped(shape: Shape) -> None:
    """Raise `ScheduleRefused` unless the stages form a V over the workers."""
    wanted = v_shaped(shape.workers)
    if tuple(tuple(sorted(stages)) for stages in shape.placement) != wanted:
        fits = shape.stages == 2 * shape.workers
        way_out = f"place the stages as {[list(each) for each in wanted]}" if fits else "use two stages for each worker"
        raise shape.refused(
            f"its stages must form a V over the workers (worker r of P owns r and 2 P - 1 - r); {way_out}, or use zb-h1"
        )


def _zb_v(shape: Shape, worker: int) -> "_Turns":
    behind, count = shape.workers - worker, max(2 * shape.workers - 1, shape.microbatches)
    turns = _Turns(shape, worker)
    turns.run("F0", 2 * behind - 1)
    turns.run("F1 F0", worker)
    turns.run("F1 I1 W1", behind)
    while turns.ran["F1"] < turns.ran["F0"] or turns.ran["F0"] < count:
        turns.run("F0", int(turns.ran["F0"] < count))
        turns.run("I0 W0 F1 I1 W1")
    turns.run("I0 I1", worker)
    turns.run("I0 W0", behind)
    turns.run("W1", turns.ran["I1"] - turns.ran["W1"])
    turns.run("W0", turns.ran["I0"] - turns.ran["W0"])
    return turns


def _dualpipe_v(shape: Shape, worker: int) -> "_Turns":
    """Return a worker's list in eight parts, as in DeepSeek's repository.

    `W` is the second half of the oldest backward that was split.
    """
    behind, here = shape.workers - 1 - worker, worker + 1
    turns = _Turns(shape, worker)
    turns.run("F0", 2 * behind)
    turns.run("F0 F1", here)
    turns.run("I1 W F1", behind)
    turns.run("F0 B1 F1 B0", shape.microbatches - 2 * shape.workers + here)
    turns.run("B1 F1 B0", behind)
    split = here // 2  # from this pair on, in the middle of it on every second worker
    turns.run("B1 B0", split)
    turns.run("B1 I0" if worker % 2 == 0 else "I1 I0")
    turns.run("I1 I0", here - split - 1)
    turns.run("W I0", behind)
    turns.run("W", here)
    return turns


class _Turns:
    """Actions of a worker, written as turns of its two stages.

    Microbatches that a step does not have are left out. `ran` counts the turns.
    """

    def __init__(self, shape: Shape, worker: int) -> None:
        self._stages = v_shaped(shape.workers)[worker]
        self._microbatches = shape.microbatches
        self._deferred: deque[Action] = deque()
        self.ran: Counter[str] = Counter()
        self.actions: list[Action] = []

    def run(self, turns: str, times: int = 1) -> None:
        """Append the actions of `turns`, repeated `times` times.

        `turns` has words such as "F0" (the next forward of the first stage), "I1" or "W".
        """
        for turn in turns.split() * times:
            self._run(turn)

    def _run(self, turn: str) -> None:
        if turn == "W":
            self.actions += [self._deferred.popleft()] if self._deferred else []
            return
        kind, stage = Kind(turn[0]), self._stages[int(turn[1])]
        counted = f"I{turn[1]}" if kind is Kind.BACKWARD else turn
        action = Action(kind, stage, self.ran[counted])
        self.ran[counted] += 1
        if action.microbatch < self._microbatches:
            self.actions.append(action)
        if kind is Kind.INPUT:
            self._deferred.append(action._replace(kind=Kind.WEIGHT))


def timed_zb_v(shape: Shape, times: Times) -> Lists:
    """Return each worker's list for one step of ZB-V at these `times`, without updates.

    Raises:
        ScheduleRefused: The stages form no V, or a time is not positive.
    """
    if min(times) <= 0:
        raise shape.refused(f"F, I and W must take some time, and are given as {', '.join(map(str, times))}")
    listed = tuple(tuple(shape.trained(actions)) for actions in zb_v(shape))
    found = [_VRun(shape, times, precedence.split()) for precedence in _PRECEDENCES]
    shortest = min(found, key=lambda pipeline: pipeline.span)
    return tuple(map(tuple, shortest.lists)) if shortest.span < _span(shape, listed, times) else listed


class _VRun:
    """A run of all workers on a clock. `lists` has the actions that each worker ran, `span` the time it took."""

    def __init__(self, shape: Shape, times: Times, precedence: Sequence[str]) -> None:
        self._shape, self._precedence, self._times = shape, precedence, dict(zip(_TIMED, times, strict=True))
        self._stages = v_shaped(shape.workers)
        self._ran: list[Counter[str]] = [Counter() for _ in self._stages]
        self._deferred: list[deque[Action]] = [deque() for _ in self._stages]
        self._free, self._held = [0.0] * shape.workers, [0] * shape.workers
        self._ends: dict[Action, float] = {}
        self._moments = [(0.0, worker) for worker in range(shape.workers)]
        self.lists: list[list[Action]] = [[] for _ in range(shape.workers)]
        while self._moments:
            self._decide(*heappop(self._moments))
        self.span = max(self._ends.values())

    def _decide(self, now: float, worker: int) -> None:
        if self._free[worker] > now or (action := self._next(now, worker)) is None:
            return
        end = self._free[worker] = self._ends[action] = now + self._times[action.kind]
        self.lists[worker].append(action)
        heappush(self._moments, (end, worker))
        if action.kind is not Kind.WEIGHT:
            self._pass_on(action, worker, end)

    def _next(self, now: float, worker: int) -> Action | None:
        for turn in self._precedence:
            action = Action(Kind(turn[0]), self._stages[worker][int(turn[1])], self._ran[worker][turn])
            if self._is_due(action, worker, turn) and _latest(self._ends, action, self._shape.stages) <= now:
                self._ran[worker][turn] += 1
                return action
        if not self._deferred[worker]:
            return None
        self._held[worker] -= 1
        return self._deferred[worker].popleft()

    def _is_due(self, action: Action, worker: int, turn: str) -> bool:
        if action.microbatch == self._shape.microbatches:
            return False
        if action.kind is Kind.INPUT:
            return action.stage >= self._shape.first_trainable
        most = 2 * self._shape.workers - (2 if turn == "F0" else 1)  # before it
        return self._held[worker] <= most

    def _pass_on(self, action: Action, worker: int, end: float) -> None:
        if action.kind is Kind.FORWARD:
            self._held[worker] += action.stage >= self._shape.first_trainable
        else:
            self._deferred[worker].append(action._replace(kind=Kind.WEIGHT))
        consumer = action.stage + (1 if action.kind is Kind.FORWARD else -1)
        if 0 <= consumer < self._shape.stages:
            heappush(self._moments, (end, min(consumer, self._shape.stages - 1 - consumer)))


def _span(shape: Shape, lists: Lists, times: Times) -> float:
    """Return how long a step of these lists takes."""
    takes = dict(zip(_TIMED, times, strict=True))
    ends: dict[Action, float] = {}
    left, free = list(map(deque, lists)), [0.0] * len(lists)
    while any(left):
        for worker, actions in enumerate(left):
            while actions and (ready := _latest(ends, actions[0], shape.stages)) < _NEVER:
                action = actions.popleft()
                free[worker] = ends[action] = max(free[worker], ready) + takes[action.kind]
    return max(free)


def _latest(ends: Mapping[Action, float], action: Action, stages: int) -> float:
    """Return when everything that `action` needs has ended; infinity as long as that is not known."""
    source = {Kind.FORWARD: action.stage - 1, Kind.INPUT: action.stage + 1}.get(Kind(action.kind), -1)
    sent = [action._replace(stage=source)] if 0 <= source < stages else []
    return max((ends.get(each, _NEVER) for each in (*action.way[:-1], *sent)), default=0)
