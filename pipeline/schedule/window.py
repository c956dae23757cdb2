"""The window, how many microbatches each stage may have in flight: computed from latencies, or checked if given."""

import math
from collections.abc import Sequence
from itertools import pairwise

from .shape import Shape


def window_for(latencies: Sequence[float], forward: float, backward: float) -> tuple[int, ...]:
    """The smallest window that hides the latencies.

    `latencies[h]` is the one-way latency between stages h and h+1, `forward` and `backward` the times of one microbatch
    in the slowest stage, all in one unit. No latency gives 1F1B's window, up to half of a forward and a backward eager
    1F1B's. Raises `ValueError` if a stage takes no time or a latency is negative.
    """
    if forward + backward <= 0 or min(latencies, default=0) < 0:
        raise ValueError(f"stages must take time and messages none or more: {forward=}, {backward=}, {latencies=}")
    return_trips = [math.ceil(1 + 2 * latency / (forward + backward) - _ROUNDING) for latency in latencies]
    return tuple(1 + sum(return_trips[stage:]) for stage in range(len(latencies) + 1))


_ROUNDING = 1e-9  # 1 + 2 * 0.8 / (0.1 + 0.7) is slightly above 3, and must not cost a microbatch


def checked_window(shape: Shape, window: Sequence[int] | None) -> Sequence[int]:
    """Returns `window`. Raises `ScheduleRefused` if it lacks a stage, stops a stage, or makes two stages deadlock."""
    if window is None or len(window) != shape.stages:
        given = "none is given" if window is None else f"there are {len(window)}"
        one_f_one_b = ", ".join(map(str, range(shape.stages, 0, -1)))
        raise shape.refused(f"the window needs one number for each stage, and {given}; 1F1B's would be {one_f_one_b}")
    for stage, in_flight in enumerate(window):
        if in_flight < 1:
            raise shape.refused(f"the window of stage {stage} is {in_flight}; nothing moves with less than 1 in flight")
    _check_deadlock(shape, window)
    return window


def _check_deadlock(shape: Shape, window: Sequence[int]) -> None:
    reached = [min(shape.microbatches, in_flight) for in_flight in window]
    for stage, (here, beyond) in enumerate(pairwise(reached)):
        if stage >= shape.first_trainable and here < beyond:
            raise shape.refused(
                f"stage {stage} would wait for a gradient with {here} in flight, and stage {stage + 1} for {beyond} "
                f"before it sends one; raise the window of stage {stage} to {beyond}, or lower the next one's"
            )
