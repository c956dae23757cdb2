"""Schedules that warm up, then alternate: a stage runs `F x w, (F B) x (M - w), B x w`.

They differ only in the warm-up w: GPipe runs all forwards first, 1F1B as few as keep the later stages busy, the others
lie between. At most w + 1 microbatches are in flight: the stage's window. A window is computed from latencies, or
checked if it is given. Four stages, 1F1B (B takes twice as long as F):

    stage 0  F0 F1 F2 F3 .. .. .. .. .. .. B0 == F4 B1 == F5 B2 == F6 B3 ...
    stage 1  .. F0 F1 F2 .. .. .. .. B0 == F3 B1 == F4 B2 == F5 B3 == F6 ...
    stage 2  .. .. F0 F1 .. .. B0 == F2 B1 == F3 B2 == F4 B3 == F5 B4 == ...
    stage 3  .. .. .. F0 B0 == F1 B1 == F2 B2 == F3 B3 == F4 B4 == F5 B5 ...

**Deferred weights.** ZB-H1 (arXiv 2401.10241) is 1F1B in which backwards are split, and the gradients of weights fill
what was idle. The stage before waits only for the gradient of the input, I; that of the weights, W, can wait until
nothing else is to be done. Stage r defers r of them, so each holds as many microbatches as stage 0 of 1F1B holds.
With P stages and at least as many microbatches the bubble is (P - 1)(F + I - W) in place of (P - 1)(F + I + W), if W is
the shortest of the three. A stage may also run more microbatches ahead, where messages take time: with K[r] in flight
until I, it defers K[0] - K[r], so that each holds K[0]. Four stages (F, I and W take equally long):

    stage 0  F0 F1 F2 F3 .. .. .. I0 W0 F4 I1 W1 ... F7 I4 W4 I5 W5 I6 W6 I7 W7
    stage 1  .. F0 F1 F2 .. .. I0 F3 I1 W0 F4 I2 ... W3 F7 I5 W4 I6 W5 I7 W6 W7
    stage 2  .. .. F0 F1 .. I0 F2 I1 F3 I2 W0 F4 ... I5 W3 F7 I6 W4 I7 W5 W6 W7
    stage 3  .. .. .. F0 I0 F1 I1 F2 I2 F3 I3 W0 ... F6 I6 W3 F7 I7 W4 W5 W6 W7
"""

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise

from .action import Action, Kind
from .shape import Shape


def gpipe(stages: int, microbatches: int) -> list[int]:
    """Each stage's warm-up in GPipe (arXiv 1811.06965): every forward, then every backward."""
    return [microbatches] * stages


def one_f_one_b(stages: int) -> list[int]:
    """Each stage's warm-up in 1F1B (PipeDream-Flush, arXiv 2006.09503)."""
    return [stages - 1 - stage for stage in range(stages)]


def eager(stages: int) -> list[int]:
    """Each stage's warm-up in eager 1F1B: hides one-way latencies up to half of a forward and a backward."""
    return [2 * (stages - 1 - stage) for stage in range(stages)]


def alternate(stage: int, numbers: range, warm_up: int, first_trainable: int) -> Iterator[Action]:
    """The actions of `stage` on the microbatches `numbers`: `warm_up` forwards, then forward and backward in turn, then
    the remaining backwards. A stage below `first_trainable` runs no backward."""
    trains = stage >= first_trainable
    warm_up = min(warm_up, len(numbers))
    for place, number in enumerate(numbers):
        yield Action(Kind.FORWARD, stage, number)
        if trains and place >= warm_up:
            yield Action(Kind.BACKWARD, stage, numbers[place - warm_up])
    for number in numbers[len(numbers) - warm_up :] if trains else ():
        yield Action(Kind.BACKWARD, stage, number)


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
    reached = [min(shape.microbatches, in_flight) for in_flight in window]
    for stage, (here, beyond) in enumerate(pairwise(reached)):
        if stage >= shape.first_trainable and here < beyond:
            raise shape.refused(
                f"stage {stage} would wait for a gradient with {here} in flight, and stage {stage + 1} for {beyond} "
                f"before it sends one; raise the window of stage {stage} to {beyond}, or lower the next one's"
            )
    return window


def with_deferred_weights(
    stage: int, numbers: range, warm_up: int, deferred: int, first_trainable: int
) -> Iterator[Action]:
    """The actions of `stage` on the microbatches `numbers`: `warm_up` forwards, then forward and input gradient in
    turn, the gradients of weights `deferred` microbatches later. A stage below `first_trainable` runs no backward."""
    trains = stage >= first_trainable
    warm_up = min(warm_up, len(numbers))
    for number in numbers[:warm_up]:
        yield Action(Kind.FORWARD, stage, number)
    for place, number in enumerate(numbers):
        if place + warm_up < len(numbers):
            yield Action(Kind.FORWARD, stage, numbers[place + warm_up])
        if trains:
            yield Action(Kind.INPUT, stage, number)
        if trains and place >= deferred:
            yield Action(Kind.WEIGHT, stage, numbers[place - deferred])
    for number in numbers[max(0, len(numbers) - deferred) :] if trains else ():
        yield Action(Kind.WEIGHT, stage, number)
