"""The schedules that a run may take: all of the catalogue that accept its placement, and windows for its latencies."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from stageline.pipeline.schedule import Placement, Schedule, ScheduleRefused, make_schedule, schedule_names, window_for

from .measured import MeasuredTimes

Window = tuple[int, ...]
Taken = Callable[[Sequence[int], Sequence[int]], int]  # bytes, for microbatches in flight and between their halves


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
    placement: Placement, microbatches: int, times: MeasuredTimes, taken: Taken, limit: int
) -> Iterator[Candidate]:
    """Every schedule of the catalogue, in its order. `taken` gives the bytes of the worker that takes most; a window is
    made smaller until that is within the `limit`."""
    for name in schedule_names():
        for window in _windows(name, placement, microbatches, times, taken, limit):
            yield _candidate(name, window, placement, microbatches, times.first_trainable)


def _candidate(
    name: str, window: Window | None, placement: Placement, microbatches: int, first_trainable: int
) -> Candidate:
    try:
        made = make_schedule(name, placement, microbatches, window=window, first_trainable=first_trainable)
    except ScheduleRefused as refused:
        return Candidate(name, window, reason=refused.reason)
    return Candidate(name, window, made)


def _windows(
    name: str, placement: Placement, microbatches: int, times: MeasuredTimes, taken: Taken, limit: int
) -> list[Window | None]:
    """With what windows to simulate a schedule: zb-h1 with 1F1B's, which is None there, with the one for the latencies,
    and with another microbatch for each hop, by which gradients of weights fill the end of a step."""
    stages = len(times.forward)

    def whole(window: Window) -> int:
        return taken(window, ())

    def halved(window: Window) -> int:
        return taken(window[:1] * stages, [window[0] - each + 1 for each in window])

    match name:
        case "window":
            return [fitting(sized_window(placement, microbatches, times), whole, limit)]
        case "zb-h1":
            sized = sized_window(placement, microbatches, times)
            roomier = tuple(
                min(microbatches, each + hops) for each, hops in zip(sized, range(stages)[::-1], strict=True)
            )
            fit = dict.fromkeys(fitting(window, halved, limit) for window in (sized, roomier))
            return [None, *(window for window in fit if window != tuple(range(stages, 0, -1)))]
        case _:
            return [None]


def sized_window(placement: Placement, microbatches: int, times: MeasuredTimes) -> Window:
    """The smallest window that hides the measured latencies beside the slowest worker."""
    costs = times.costs(halved=False)
    forward = max(sum(costs.forward[stage] for stage in stages) for stages in placement)
    whole = [
        sum(costs.forward[stage] + costs.input[stage] + costs.weight[stage] for stage in stages) for stages in placement
    ]
    window = window_for(times.latency, forward, max(max(whole) - forward, 1e-9))
    return tuple(min(microbatches, each) for each in window)


def fitting(window: Window, taken: Callable[[Window], int], limit: int) -> Window:
    """The window, with the most in flight lowered by one again and again until it is within the limit, or 1
    everywhere. Each stage keeps at least as many as the next one."""
    while taken(window) > limit and window[0] > 1:
        most = window[0]
        last = max(stage for stage, each in enumerate(window) if each == most)
        window = tuple(each - (stage == last) for stage, each in enumerate(window))
    return window
