"""Between which schedules a run can choose: those that accept its placement, and for which its workers have room."""

from collections.abc import Iterator, Sequence

from stageline.pipeline.plan import PlanError
from stageline.pipeline.schedule import Schedule, ScheduleRefused, make_schedule, schedule_names
from stageline.pipeline.schedule.check import check_schedule
from stageline.workers.extras.preflight.trial_result import ScheduleEstimate, StageEstimate
from stageline.workers.runtime.job import Job


def choosable(job: Job, stages: Sequence[StageEstimate]) -> Iterator[ScheduleEstimate]:
    """Every schedule of the catalogue but the window, which is made as large as the links need and memory allows. What
    halves of a backward take is measured in the run."""
    limit = job.plan.schedule.memory or 0
    for name in schedule_names():
        if name == "window":
            continue
        try:
            made = _made(job, name)
        except ScheduleRefused as refused:
            yield ScheduleEstimate(name, (), 0, refused.reason)
            continue
        in_flight, taken = _room(made, stages)
        reason = "" if taken <= limit else "takes more than schedule.memory"
        halves = made.halves_backwards
        yield ScheduleEstimate(name, in_flight, taken, (_unsplit(stages) if halves else "") or reason, halves)


def without_room(job: Job, stages: Sequence[StageEstimate]) -> Iterator[PlanError]:
    """An error if the schedule that the run begins with has no room: it holds the fewest microbatches."""
    limit = job.plan.schedule.memory
    if limit is None:
        return
    _, taken = _room(job.schedule, stages)
    if taken > limit:
        yield PlanError(
            "schedule.memory",
            f"a worker takes {taken} bytes with {job.schedule.name}, with which the run begins, and which holds the "
            f'fewest microbatches that keep every worker busy. Use "{-(-taken // 2**20)}MiB" or more, more stages, or '
            f'smaller microbatches; or name = "window" with fewer of them in flight',
            value=str(limit),
        )


def _made(job: Job, name: str) -> Schedule:
    placement, first = job.schedule.placement, job.schedule.first_trainable
    return make_schedule(name, placement, job.schedule.microbatches, first_trainable=first)


def _room(schedule: Schedule, stages: Sequence[StageEstimate]) -> tuple[tuple[int, ...], int]:
    """The microbatches in flight, and the bytes of the worker that takes most."""
    verdict = check_schedule(schedule)
    peaks, halfway = verdict.stage_peak, verdict.halfway_peak
    taken = [
        sum(_bytes(stages[stage], peaks[stage], halfway[stage]) for stage in owned) for owned in schedule.placement
    ]
    return peaks, max(taken)


def _bytes(stage: StageEstimate, in_flight: int, halfway: int) -> int:
    activations = stage.bytes["activations"] // max(1, stage.in_flight)
    return stage.total - stage.bytes["activations"] + activations * in_flight + (stage.halfway or 0) * halfway


def _unsplit(stages: Sequence[StageEstimate]) -> str:
    """Why not all of them can split a backward; "" if they can."""
    whole = [str(each.stage) for each in stages if each.halfway is None]
    if not whole:
        return ""
    named = f"stage {whole[0]}" if len(whole) == 1 else f"stages {', '.join(whole)}"
    return f"splits backwards in two halves, and {named} cannot, since activations are recomputed there"
