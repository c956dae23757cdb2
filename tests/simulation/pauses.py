"""A person who pauses a run, and has it go on later; and a look at what holds while it is paused."""

from typing import TYPE_CHECKING

from stageline.broker.control.pauses import PauseRun
from stageline.broker.coordinator import pausing

if TYPE_CHECKING:
    from simulation.world import World

LOOK = 0.3  # seconds between two looks of the person
PAUSED = "every worker stands before the step of a pause"


class Person:
    """Who pauses the run, and looks at it until it goes on: a request may be lost with the broker, or its records."""

    def __init__(self, world: "World") -> None:
        self._world = world
        self._until = 0.0  # when no pause is wanted any more
        self._looks = False

    def pause(self, seconds: float) -> bool:
        """Whether there was anybody to ask."""
        world, clock = self._world, self._world.environment.clock
        if not world.broker.alive:
            return False
        self._until = max(self._until, clock.now + seconds)
        world.broker.note(PauseRun("ada", "a backup"))
        if not self._looks:
            self._looks = True
            clock.after(LOOK, self._look)
        return True

    def _look(self) -> None:
        """Until the end of the run, since a worker may know of a pause that the records have lost."""
        world, clock = self._world, self._world.environment.clock
        run = world.core.run
        if world.broker.alive and run.outcome is None:
            if pausing.in_effect(run):
                world.fired[PAUSED] += 1
                self._check()
            if run.pauses.present is not None and clock.now >= self._until:
                world.broker.note(PauseRun("ada", resumes=True))
        clock.after(LOOK, self._look)

    def _check(self) -> None:
        """No worker has begun the step before which all stand; in a run that flushes, each has done those before."""
        world, step = self._world, self._world.core.run.pauses.present.step
        flushes = world.scenario.schedule.mode == "sync"
        for worker in world.workers:
            member = world.core.run.registry.current(worker.incarnation)
            if worker.loop is None or member is None:
                continue
            finished = worker.loop.progress.finished
            if any(done > step or (flushes and done < step) for done in finished.values()):
                world.environment.report(f"{worker} stands before step {step}, and has done {finished}")
