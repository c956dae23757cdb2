"""Number of microbatches of a line that names none, and news of a schedule in which workers wait for long.

2 for each stage, if several workers compute        4 stages on 4 workers: 8 microbatches, 27 % of a step is idle
at most one for two rows of the first batch         as far as that is known before the run
those of the run that is resumed                    its plan has recorded them
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from stageline.pipeline.plan import Plan
from stageline.pipeline.program import Costs, check_schedule
from stageline.pipeline.schedule import Schedule, ScheduleRefused

from .arguments import LineCall, LineOptions

OF_STAGE = 2
MOST_IDLE = 0.3  # share of a step
_LARGEST = 8  # microbatches for each worker, up to which a better number is looked for
_LONGEST = 4096  # forwards of a step that is still simulated; the bubble of a longer one is small


def microbatches_for(options: LineOptions, placement: Sequence[Sequence[int]], rows: int | None = None) -> int:
    """Return the number of microbatches of a batch for a line: the one that is given, or one by the number of stages.

    Args:
        options: Arguments of the line.
        placement: Stages of each worker.
        rows: Rows of a batch, if known; microbatches get two or more of them if possible.
    """
    if options.microbatches is not None:
        return options.microbatches
    workers = len(placement)
    if workers == 1:
        return 1
    wanted = OF_STAGE * sum(map(len, placement))
    if rows is None or rows >= 2 * wanted:
        return wanted
    most = max(1, rows // 2)
    return most - most % workers if most > workers else most  # some schedules want the same number for each worker


def recorded_microbatches(call: LineCall) -> LineCall:
    """Return the arguments of a line; one that resumes a run and names no number of microbatches gets the run's."""
    if call.resume is None or call.microbatches is not None:
        return call
    from stageline.workers.runs import folder as runs  # not needed inline

    saved = Path(call.resume)
    kept = saved if runs.is_run(saved) else Path(call.folder) / saved  # only the run's name
    return replace(call, microbatches=runs.recorded_microbatches(kept))


def idle_news(plan: Plan, schedule: Schedule, frozen: Collection[int]) -> tuple[str, ...]:
    """Return a line for people if the busiest worker waits for more than `MOST_IDLE` of a step; else none.

    Args:
        plan: Plan of the run.
        schedule: Its schedule.
        frozen: Stages in which nothing is trained.
    """
    if schedule.stages * schedule.microbatches > _LONGEST:
        return ()
    share = _idle(schedule, frozen)
    if share <= MOST_IDLE:
        return ()
    better = next((each for each in _larger(plan, schedule, frozen) if each[1] <= MOST_IDLE), None)
    way_out = (
        "" if better is None else f"; microbatches={better[0]}, if batches have the rows, makes that {better[1]:.0%}"
    )
    number, batches = plan.schedule.microbatches, plan.schedule.accumulate
    each = "" if batches == 1 else f" of each of {batches} batches"
    return (
        f"with {number} microbatch{'' if number == 1 else 'es'}{each} in {schedule.name}, the busiest worker is idle "
        f"for {share:.0%} of each step, if a backward takes as long as two forwards and a message no time{way_out}",
    )


def _idle(schedule: Schedule, frozen: Collection[int]) -> float:
    verdict = check_schedule(schedule, Costs.even(schedule.stages, frozen=frozen))
    return verdict.bubble / verdict.span if verdict.span else 0.0


def _larger(plan: Plan, schedule: Schedule, frozen: Collection[int]) -> Iterator[tuple[int, float]]:
    """Yield larger numbers of microbatches, each with the idle share of its schedule."""
    workers, choice = len(plan.placement), plan.schedule
    for number in range(workers, _LARGEST * workers + 1, workers):
        if number > choice.microbatches and choice.rows is None:
            wider = plan.model_copy(update={"schedule": choice.model_copy(update={"microbatches": number})})
            try:
                made = wider.make_schedule(first_trainable=schedule.first_trainable)
            except ScheduleRefused:
                continue
            yield number, _idle(made, frozen)
