"""Steps as a schedule plans them, timed by the costs of its actions and messages.

`simulate` in `pipeline/program/timing.py` also counts the messages in queues, and obeys windows of queues. Without such
windows, one order of all actions holds for any costs: each comes after those whose messages it takes.
"""

from collections import defaultdict
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from stageline.pipeline.program import Costs, Timed, compile_program
from stageline.pipeline.program.operations import Op
from stageline.pipeline.program.timing import Deadlock, latency_of
from stageline.pipeline.schedule import Action, Schedule

_MOST = 40_000  # actions that are planned, if these are more than four steps


class _Planned(NamedTuple):
    """An action, and the messages that it takes: by queue, the place of the action that sends the message."""

    worker: int
    step: int
    action: Action
    takes: tuple[tuple[str, int], ...]


class PlannedSteps:
    """The actions of some steps of a schedule."""

    def __init__(self, schedule: Schedule, steps: int | None = None) -> None:
        """Put the actions into order.

        Args:
            schedule: Schedule.
            steps: Number of steps. None: as many as it takes to reach a steady state.

        Raises:
            Deadlock: The workers of the schedule wait for each other for ever.
        """
        self._schedule, self._steps = schedule, steps or _until_steady(schedule)
        program = compile_program(schedule)
        self._queues = program.queues
        workers = range(len(schedule.placement))
        self._order = _ordered(schedule, [list(program.ops(worker, range(self._steps))) for worker in workers])

    def timed(self, costs: Costs) -> list[Timed]:
        """Return every action with its times, from second 0 on, by start."""
        columns = self._order, self._ends(costs), self._seconds(costs)
        found = [
            Timed(each.worker, each.action, end - took, end, each.step)
            for each, end, took in zip(*columns, strict=True)
        ]
        return sorted(found, key=lambda timed: timed.start)

    def seconds(self, costs: Costs) -> float:
        """Return the seconds of a step, on average from the end of half of the steps to the end of all."""
        ends, half = self._ends(costs), self._steps // 2
        middle = max(end for each, end in zip(self._order, ends, strict=True) if each.step == half - 1)
        last = max(end for each, end in zip(self._order, ends, strict=True) if each.step == self._steps - 1)
        return (last - middle) / (self._steps - half)

    def _ends(self, costs: Costs) -> list[float]:
        """Return the end of each action."""
        late = {name: latency_of(costs, self._schedule, queue) for name, queue in self._queues.items()}
        free, ends = [0.0] * len(self._schedule.placement), list[float]()
        for (worker, _, _, takes), took in zip(self._order, self._seconds(costs), strict=True):
            start = free[worker]
            for name, source in takes:
                if (arrival := ends[source] + late[name]) > start:
                    start = arrival
            free[worker] = end = start + took
            ends.append(end)
        return ends

    def _seconds(self, costs: Costs) -> list[float]:
        """Return the seconds that each action takes."""
        stage = self._schedule.replicas.stage
        alike = {each.action[:2]: each.action for each in self._order}
        seconds = {key: costs.of(action._replace(stage=stage(action.stage))) for key, action in alike.items()}
        return [seconds[each.action[:2]] for each in self._order]


def planned_bubble(schedule: Schedule) -> float | None:
    """Return the share of a step that the busiest worker waits, if all stages take equally long.

    In asynchronous mode, these are as many steps as it takes to reach a steady state. Returns None if no action takes
    any time. Raises `Deadlock`.
    """
    costs, busy = Costs.even(schedule.stages), [0.0] * len(schedule.placement)
    if schedule.mode == "sync":
        timed = first_step(schedule, costs)
    else:
        timed = PlannedSteps(schedule, max(3, -(-3 * schedule.stages // schedule.microbatches))).timed(costs)
    for each in timed:
        busy[each.worker] += each.end - each.start
    span = max(each.end for each in timed)
    return 1 - max(busy) / span if span else None


@lru_cache(maxsize=4)
def planned_steps(schedule: Schedule) -> PlannedSteps:
    """Return as many steps of a schedule as it takes to reach a steady state. Raises `Deadlock`."""
    return PlannedSteps(schedule)


def first_step(schedule: Schedule, costs: Costs) -> list[Timed]:
    """Return the actions of one step alone, from second 0 on, by start. Raises `Deadlock`."""
    if schedule.mode == "sync":
        return [each for each in planned_steps(schedule).timed(costs) if each.step == 0]
    return PlannedSteps(schedule, 1).timed(costs)


def _until_steady(schedule: Schedule) -> int:
    """Return the number of steps to plan: two if a step ends before the next begins."""
    if schedule.mode == "sync":
        return 2
    each = max(1, sum(map(len, schedule.workers)))
    return max(4, min(4 * schedule.stages, _MOST // each))


def _ordered(schedule: Schedule, listed: Sequence[Sequence[tuple[int, Op]]]) -> list[_Planned]:
    """Return the operations of all workers, each after those whose messages it takes."""
    placed: list[_Planned] = []
    sent: dict[str, list[int]] = defaultdict(list)
    taken: dict[str, int] = defaultdict(int)
    at, total = [0] * len(listed), sum(map(len, listed))
    while (before := len(placed)) < total:
        for worker, ops in enumerate(listed):
            while at[worker] < len(ops):
                step, op = ops[at[worker]]
                if any(len(sent[name]) <= taken[name] for name in op.takes):
                    break
                for name in op.gives:
                    sent[name].append(len(placed))
                takes = tuple((name, sent[name][taken[name]]) for name in op.takes)
                placed.append(_Planned(worker, step, op.action, takes))
                for name in op.takes:
                    taken[name] += 1
                at[worker] += 1
        if len(placed) == before:
            raise Deadlock(f"schedule {schedule.name} deadlocks: see `stageline schedule`")
    return placed
