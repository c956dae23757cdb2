"""The schedules that a run may take: all of the catalogue that accept its placement, and a window for its latencies."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from stageline.pipeline.schedule import Placement, Schedule, ScheduleRefused, make_schedule, schedule_names, window_for

from .measured import MeasuredTimes

WINDOW = "window"


@dataclass(frozen=True, slots=True)
class StageBytes:
    """What a stage takes in its worker's memory: `fixed` with its weights, gradients and optimizer, so much more for
    each `microbatch` in flight, and again more for each that is `halfway` between the halves of its backward; None if
    the stage cannot split backwards."""

    fixed: int
    microbatch: int
    halfway: int | None = 0


@dataclass(frozen=True, slots=True)
class Candidate:
    """A schedule, `window` if it has one; or why it cannot be made for this placement."""

    name: str
    window: tuple[int, ...] | None = None
    schedule: Schedule | None = None
    reason: str = ""

    @property
    def halves(self) -> bool:
        """Whether it runs backwards in two halves."""
        return self.schedule is not None and self.schedule.halves_backwards


def candidates(
    placement: Placement, microbatches: int, times: MeasuredTimes, taken: Callable[[Sequence[int]], int], limit: int
) -> Iterator[Candidate]:
    """Every schedule of the catalogue, in its order. `taken` gives the bytes of the worker that takes most, for so many
    microbatches in flight on each stage; a window is made smaller until that is within the `limit`."""
    for name in schedule_names():
        window = None
        if name == WINDOW:
            window = fitting(sized_window(placement, microbatches, times), taken, limit)
        try:
            made = make_schedule(name, placement, microbatches, window=window, first_trainable=times.first_trainable)
        except ScheduleRefused as refused:
            yield Candidate(name, window, reason=refused.reason)
        else:
            yield Candidate(name, window, made)


def sized_window(placement: Placement, microbatches: int, times: MeasuredTimes) -> tuple[int, ...]:
    """The smallest window that hides the measured latencies beside the slowest worker."""
    costs = times.costs(halved=False)
    forward = max(sum(costs.forward[stage] for stage in stages) for stages in placement)
    whole = [
        sum(costs.forward[stage] + costs.input[stage] + costs.weight[stage] for stage in stages) for stages in placement
    ]
    window = window_for(times.latency, forward, max(max(whole) - forward, 1e-9))
    return tuple(min(microbatches, each) for each in window)


def fitting(window: tuple[int, ...], taken: Callable[[Sequence[int]], int], limit: int) -> tuple[int, ...]:
    """The window, with the most in flight lowered by one again and again until it is within the limit, or 1
    everywhere. Each stage keeps at least as many as the next one."""
    while taken(window) > limit and window[0] > 1:
        most = window[0]
        last = max(stage for stage, each in enumerate(window) if each == most)
        window = tuple(each - (stage == last) for stage, each in enumerate(window))
    return window
