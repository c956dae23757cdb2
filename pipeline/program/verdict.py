"""The checker: simulates all workers of a schedule, and computes what is true of it before anything runs."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from stageline.pipeline.program.complete import Listed, check_complete, check_order, check_queues
from stageline.pipeline.program.timing import Costs, Timed, simulate
from stageline.pipeline.schedule import ENDS_MICROBATCH, Kind, Schedule

from .base import compile_program
from .program import Program


@dataclass(frozen=True, slots=True)
class Verdict:
    """The properties of a sound schedule. Times are in the unit of the costs.

    Attributes:
        timed: Every action with its times, by start.
        span: Time from the first start to the last end.
        busy: Time that each worker computes.
        stage_peak: Most microbatches that a stage has run forward and not yet wholly backward, by stage or copy.
        worker_peak: Most such microbatches over all stages of a worker, by worker.
        halfway_peak: Most microbatches between the two halves of their backwards, by stage or copy.
        queue_bound: Most messages put and not yet taken, for any costs, by queue ("forward-1").
    """

    timed: tuple[Timed, ...]
    span: float
    busy: tuple[float, ...]
    stage_peak: tuple[int, ...]
    worker_peak: tuple[int, ...]
    halfway_peak: tuple[int, ...]
    queue_bound: Mapping[str, int]

    @property
    def ideal(self) -> float:
        """Shortest possible span: the time that the busiest worker computes."""
        return max(self.busy)

    @property
    def bubble(self) -> float:
        """Time that the busiest worker waits."""
        return self.span - self.ideal

    @property
    def idle(self) -> tuple[float, ...]:
        """Share of the span that each worker waits, 0 to 1."""
        return tuple(1 - busy / self.span if self.span else 0.0 for busy in self.busy)


def check_schedule(
    checked: Schedule | Program,
    costs: Costs | None = None,
    *,
    steps: int | None = None,
    windows: Mapping[str, int] | None = None,
) -> Verdict:
    """Check a schedule, or the first steps of a compiled program, and simulate its workers.

    Args:
        checked: Schedule, or program.
        costs: Times of actions and messages. None: a forward takes 1, a backward 2, an update and a message nothing.
        steps: Steps to simulate. None: one in synchronous mode, and in asynchronous mode as many as it takes to reach
            a steady state.
        windows: Messages that may be put and not yet taken, by queue ("forward-1", "backward-0"). A worker that would
            put more waits.

    Raises:
        UnsoundSchedule: The schedule cannot be run: `Incomplete`, `Disordered` or `Deadlock`.
        ValueError: The costs or windows do not fit the schedule.
    """
    program = checked if isinstance(checked, Program) else compile_program(checked)
    program = replace(program, sections=program.sections[:1])
    schedule = program.schedule
    over = range(steps or (1 if schedule.mode == "sync" else _until_steady(schedule)))
    workers = range(len(schedule.placement))
    programs = [list(program.ops(worker, over)) for worker in workers]
    for worker, listed in enumerate(programs):
        check_complete(schedule, worker, over)
        check_order(schedule, worker, listed)
    check_queues(program)
    timed, queue_bound = simulate(program, costs or Costs.even(schedule.stages), over, windows or {})
    return Verdict(
        timed=tuple(timed),
        span=max(each.end for each in timed),
        busy=tuple(sum(each.end - each.start for each in timed if each.worker == worker) for worker in workers),
        stage_peak=tuple(
            max(_in_flight(schedule, programs[schedule.owner(stage)], (stage,))) for stage in range(schedule.copies)
        ),
        worker_peak=tuple(
            max(_in_flight(schedule, listed, stages))
            for listed, stages in zip(programs, schedule.placement, strict=True)
        ),
        halfway_peak=tuple(max(_halfway(programs[schedule.owner(stage)], stage)) for stage in range(schedule.copies)),
        queue_bound=queue_bound,
    )


def _until_steady(schedule: Schedule) -> int:
    """Return the asynchronous steps to simulate: 3 or more, with three times as many microbatches as stages."""
    return max(3, -(-3 * schedule.stages // schedule.microbatches))


def _in_flight(schedule: Schedule, listed: Listed, stages: tuple[int, ...]) -> Iterator[int]:
    """Yield the number of microbatches that `stages` hold after each action. Forward-only stages hold none."""
    in_flight = 0
    yield in_flight
    for action in (op.action for _, op in listed):
        if action.stage in stages and schedule.trains(action.stage):
            in_flight += (action.kind is Kind.FORWARD) - (action.kind in ENDS_MICROBATCH)
            yield in_flight


def _halfway(listed: Listed, stage: int) -> Iterator[int]:
    """Yield, after each action, the number of microbatches of `stage` between the halves of their backwards."""
    halfway = 0
    yield halfway
    for action in (op.action for _, op in listed):
        if action.stage == stage:
            halfway += (action.kind is Kind.INPUT) - (action.kind is Kind.WEIGHT)
            yield halfway
