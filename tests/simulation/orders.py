"""Runs that choose their schedule: a broker that changes it for no reason, and a look at who goes by which."""

import random
from collections.abc import Mapping

from simulation.environment import Environment
from stageline.broker.control.messages import Assigned
from stageline.pipeline.choice import ChosenSchedule, MeasuredTimes, ScheduleReview, StageBytes
from stageline.pipeline.program import Program
from stageline.pipeline.schedule import Schedule
from stageline.workers.runtime.orders import StepOrders

CHANGED = "the schedule is changed"
MEMORY = 2**40  # bytes, more than any of the schedules takes
_NAMES = ("1f1b", "gpipe", "eager-1f1b", "window", "zb-h1")
_OFTEN = 0.5  # seconds between two changes, on the average


class RestlessReview(ScheduleReview):
    """Chooses a schedule at random, again and again."""

    rng: random.Random
    stages: int

    def advance(self, now: float, begun: int, stages: Mapping[int, StageBytes]) -> ChosenSchedule | None:
        if self._next == 0.0:
            self._next = now + self.rng.expovariate(1 / _OFTEN)
        if now < self._next:
            return None
        self._next = now + self.rng.expovariate(1 / _OFTEN)
        name, seconds = self.rng.choice(_NAMES), self.rng.choice([0.1, 0.5, 2.0])
        larger = tuple(range(self.stages + self.rng.randrange(3), 0, -1))[: self.stages]
        window = larger if name == "window" or (name == "zb-h1" and self.rng.random() < 0.5) else None
        none = (0.0,) * self.stages
        times = MeasuredTimes(none, none, none, none, none, none[1:], none[1:], seconds)
        return ChosenSchedule(name, window, changes=True, why="at random", compared=(), times=times)


def restless(schedule: Schedule, rng: random.Random) -> RestlessReview:
    """Of a run that begins with `schedule`."""
    found = RestlessReview(schedule.placement, schedule.microbatches, MEMORY, (schedule.name, None), begins=None)
    found.rng, found.stages = rng, schedule.stages
    return found


class WatchedOrders(StepOrders):
    """Sees that no two workers of now go through a step by different schedules."""

    def watch(self, environment: Environment, index: int, incarnation: int) -> None:
        self._environment, self._index, self._incarnation = environment, index, incarnation
        environment.ordered[index] = incarnation, {}

    def begin(self, step: int, base: Program) -> Program:
        program = super().begin(step, base)
        incarnation, mine = self._environment.ordered.get(self._index, (None, {}))  # the newest may have ended
        if incarnation == self._incarnation:
            mine[step] = program
            for other, (_, theirs) in self._environment.ordered.items():
                if theirs.get(step, program).step != program.step:
                    mine_by, other_by = (
                        f"{program.schedule.name} at worker {self._index}",
                        f"{theirs[step].schedule.name} at {other}",
                    )
                    self._environment.report(f"step {step} goes by {mine_by}, by {other_by}")
        return program


def orders_of(environment: Environment, assigned: Assigned) -> WatchedOrders | None:
    """Of a worker, if the run chooses its schedule."""
    scenario = environment.scenario
    if not scenario.chooses:
        return None
    orders = WatchedOrders(assigned.orders, assigned.closed, assigned.step)
    orders.watch(environment, assigned.index, assigned.incarnation)
    return orders
