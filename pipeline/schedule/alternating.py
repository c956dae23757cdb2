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

**Interleaved 1F1B** (arXiv 2104.04473): each worker owns several stages, P apart, and takes them in turn.

The stages loop over the workers (worker r of P owns r, P + r, 2P + r, ...), and microbatches run in groups: a worker
forwards a group through its first stage, then through its second, and so on, before it begins the next group.
Two workers with two stages each, groups of two (stage before, microbatch after the letter; B takes twice as long):

    worker 0  0F0 0F1 2F0 2F1 0F2 ... 2B0 === 0F3 2B1 === 2F2 0B0 === 2F3 0B1 === ... 2B2 === ...
    worker 1  ... 1F0 1F1 3F0 3B0 === 3F1 3B1 === 1F2 1B0 === 1F3 1B1 === 3F2 3B2 === 3F3 3B3 ...

**Breadth first** (arXiv 2211.05953): each worker runs all microbatches through one of its stages before it turns to the
next. A stage is so in use once in a forward pass and once in a backward pass, in one piece: right where other weights
are elsewhere meanwhile. It has the bubble of interleaved 1F1B, (P - 1)(F + B) / V with V stages a worker and F
and B the times of a worker, and the memory of GPipe. Backwards are in ascending order of microbatches, as everywhere
here; the paper's bubble does not depend on it. Two workers with two stages each (B takes twice as long):

    worker 0  0F0 0F1 2F0 2F1 ... ... ... 2B0 === 2B1 === 0B0 === 0B1 ===
    worker 1  ... 1F0 1F1 3F0 3F1 3B0 === 3B1 === 1B0 === 1B1 ===

**Merged.** The lists of stages on one worker are merged by the time at which each action would start on a worker of its
own. This works for any placement: neighbours on one worker, a U (first and last stage together), four stages on three
workers. All workers follow one order in time, in which nothing starts before its data, so they cannot deadlock.
"""

import math
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import pairwise

from .action import Action, Kind, Lists
from .shape import Shape

# Costs that are assumed before a run; messages take no time.
_COST: dict[str, int] = {Kind.FORWARD: 1, Kind.BACKWARD: 2, Kind.INPUT: 1, Kind.WEIGHT: 1}


def gpipe(stages: int, microbatches: int) -> list[int]:
    """Return each stage's warm-up in GPipe (arXiv 1811.06965): every forward, then every backward."""
    return [microbatches] * stages


def one_f_one_b(stages: int, microbatches: int = 0) -> list[int]:
    """Return each stage's warm-up in 1F1B (PipeDream-Flush, arXiv 2006.09503), for any number of microbatches."""
    return [stages - 1 - stage for stage in range(stages)]


def eager(stages: int, microbatches: int) -> list[int]:
    """Return each stage's warm-up in eager 1F1B: hides one-way latencies up to half of a forward and a backward."""
    return [2 * each for each in one_f_one_b(stages)]


def alternate(stage: int, numbers: range, warm_up: int, deferred: int | None = None) -> Iterator[Action]:
    """Yield the actions of a stage that trains: forwards, then forward and backward in turn, then backwards.

    Args:
        stage: The stage.
        numbers: Microbatches, in this order.
        warm_up: Forwards before the first backward, beyond the one before every backward.
        deferred: Microbatches by which gradients of weights come after gradients of inputs. None for whole backwards.
    """
    warm_up = min(warm_up, len(numbers))
    for number in numbers[:warm_up]:
        yield Action(Kind.FORWARD, stage, number)
    for place, number in enumerate(numbers):
        if place + warm_up < len(numbers):
            yield Action(Kind.FORWARD, stage, numbers[place + warm_up])
        yield Action(Kind.BACKWARD if deferred is None else Kind.INPUT, stage, number)
        if deferred is not None and place >= deferred:
            yield Action(Kind.WEIGHT, stage, numbers[place - deferred])
    for number in () if deferred is None else numbers[max(0, len(numbers) - deferred) :]:
        yield Action(Kind.WEIGHT, stage, number)


def window_for(latencies: Sequence[float], forward: float, backward: float) -> tuple[int, ...]:
    """Return the smallest window that hides the latencies: microbatches in flight, by stage.

    No latency gives 1F1B's window, a latency of up to half of a forward and a backward gives eager 1F1B's.

    Args:
        latencies: `latencies[h]` is the one-way latency between stages h and h+1.
        forward: Time of a forward of one microbatch in the slowest stage, in the unit of the latencies.
        backward: Time of a backward of one microbatch in the slowest stage, in the same unit.

    Raises:
        ValueError: A stage takes no time, or a latency is negative.
    """
    if forward + backward <= 0 or min(latencies, default=0) < 0:
        raise ValueError(f"stages must take time and messages none or more: {forward=}, {backward=}, {latencies=}")
    return_trips = [math.ceil(1 + 2 * latency / (forward + backward) - _ROUNDING) for latency in latencies]
    return tuple(1 + sum(return_trips[stage:]) for stage in range(len(latencies) + 1))


_ROUNDING = 1e-9  # 1 + 2 * 0.8 / (0.1 + 0.7) is slightly above 3, and must not cost a microbatch


def checked_window(shape: Shape, window: Sequence[int] | None) -> Sequence[int]:
    """Return `window`. Raises `ScheduleRefused` if it lacks a stage, stops a stage, or makes two stages deadlock."""
    if window is None or len(window) != shape.stages:
        given = "none is given" if window is None else f"there are {len(window)}"
        one_f_one_b = ", ".join(map(str, range(shape.stages, 0, -1)))
        raise shape.refused(f"the window needs one number for each stage, and {given}; 1F1B's would be {one_f_one_b}")
    for stage, in_flight in enumerate(window):
        if in_flight < 1:
            raise shape.refused(f"the window of stage {stage} is {in_flight}; nothing moves with less than 1 in flight")
    reached = [min(shape.microbatches, in_flight) for in_flight in window]
    for stage, (here, beyond) in list(enumerate(pairwise(reached)))[shape.first_trainable :]:
        if here < beyond:
            raise shape.refused(
                f"stage {stage} would wait for a gradient with {here} in flight, and stage {stage + 1} for {beyond} "
                f"before it sends one; raise the window of stage {stage} to {beyond}, or lower the next one's"
            )
    return window


def interleaved(shape: Shape) -> Lists:
    """Return each worker's list for one step of interleaved 1F1B, without updates.

    Raises:
        ScheduleRefused: The stages do not loop over the workers, or the microbatches do not divide into groups.
    """
    _check_looped(shape)
    if not _divide(shape.workers, shape.microbatches):
        numbers = range(1, shape.microbatches + shape.workers + 1)
        fit = [number for number in numbers if _divide(shape.workers, number)]
        below = max(number for number in fit if number < shape.microbatches)
        above = min(number for number in fit if number > shape.microbatches)
        raise shape.refused(
            f"the microbatches do not divide into {shape.microbatches // shape.workers} equal groups; "
            f"the nearest numbers that work on {shape.workers} workers are {below} and {above}"
        )
    size = shape.microbatches // max(1, shape.microbatches // shape.workers)
    return tuple(tuple(_worker(shape, worker, size)) for worker in range(shape.workers))


def breadth_first(shape: Shape) -> Lists:
    """Return each worker's list for one breadth-first step, without updates.

    Raises:
        ScheduleRefused: The stages do not loop over the workers.
    """
    _check_looped(shape)
    numbers = range(shape.microbatches)
    return tuple(
        (
            *(Action(Kind.FORWARD, stage, number) for stage in sorted(stages) for number in numbers),
            *(Action(Kind.BACKWARD, stage, number) for stage in sorted(stages)[::-1] for number in numbers),
        )
        for stages in shape.placement
    )


def _check_looped(shape: Shape) -> None:
    looped = [list(range(worker, shape.stages, shape.workers)) for worker in range(shape.workers)]
    multiple = shape.stages % shape.workers == 0
    if not multiple or list(map(sorted, shape.placement)) != looped:
        way_out = f"place the stages as {looped}" if multiple else f"use a multiple of {shape.workers} stages"
        raise shape.refused(
            f"its stages must loop over the workers (worker r of P owns r, P + r, ...); {way_out}, or use 1f1b"
        )


def _divide(workers: int, microbatches: int) -> bool:
    """Return True if microbatches divide into equal groups of at least as many as there are workers, or into one."""
    return microbatches % max(1, microbatches // workers) == 0


def _worker(shape: Shape, worker: int, size: int) -> Iterator[Action]:
    turns = shape.stages // shape.workers
    places = turns * shape.microbatches
    warm_up = min(places, (turns - 1) * size + 2 * (shape.workers - 1 - worker))

    def action(kind: Kind, place: int) -> Action:
        turn = place // size % turns
        stage = (turn if kind is Kind.FORWARD else turns - 1 - turn) * shape.workers + worker
        return Action(kind, stage, place // (size * turns) * size + place % size)

    for place in range(places):
        yield action(Kind.FORWARD, place)
        if place >= warm_up:
            yield action(Kind.BACKWARD, place - warm_up)
    for place in range(places - warm_up, places):
        yield action(Kind.BACKWARD, place)


def merge(lists: Sequence[Iterator[Action]], shape: Shape, ahead: int = sys.maxsize) -> Iterator[Action]:
    """Yield all actions of all stages' lists in the order of their start.

    Of actions that start at once a backward goes first, its second half last; then the lower number, then the later
    stage.

    Args:
        lists: Actions of each stage, in order.
        shape: Shape of the schedule.
        ahead: Microbatches by which a stage below the first trainable one, which waits for no gradient, may be ahead of
            the next stage.
    """
    free, first = [0] * len(lists), shape.first_trainable
    most = {f"forward-{stage + 1}": ahead for stage in range(first)}
    backward = (f"backward-{stage}" for stage in range(first, len(lists) - 1))
    forward = (f"forward-{stage}" for stage in range(1, len(lists)))
    arrivals: dict[str, deque[int]] = {queue: deque() for queue in (*forward, *backward)}  # not used yet

    def start(action: Action) -> int | None:
        """Return when `action` can start; None until its message was sent, and while it is too far ahead."""
        if len(arrivals.get(action.outbound, ())) >= most.get(action.outbound, sys.maxsize):
            return None
        arrived = arrivals.get(action.inbound, (0,))
        return max(free[action.stage], arrived[0]) if arrived else None

    heads = [next(actions, None) for actions in lists]
    while ready := [(at, action) for action in heads if action and (at := start(action)) is not None]:
        at, action = min(ready, key=_precedence)
        free[action.stage] = at + _COST[action.kind]
        if action.inbound in arrivals:
            arrivals[action.inbound].popleft()
        if action.outbound in arrivals:
            arrivals[action.outbound].append(free[action.stage])
        heads[action.stage] = next(lists[action.stage], None)
        yield action


_URGENCY: dict[str, int] = {Kind.BACKWARD: 0, Kind.INPUT: 0, Kind.FORWARD: 1, Kind.WEIGHT: 2}


def _precedence(candidate: tuple[int, Action]) -> tuple[int, int, int, int]:
    start, action = candidate
    return start, _URGENCY[action.kind], action.microbatch, -action.stage
