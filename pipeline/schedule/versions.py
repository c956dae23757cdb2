"""Asynchronous mode: steps overlap, and a stage keeps the versions of its weights that microbatches in flight read.

    1f1b   PipeDream (SOSP'19)              an update after every microbatch, each of which is a step
    2bw    PipeDream-2BW (arXiv 2006.09503) an update after several, with the gradients at the weights before the newest

Both are 1F1B over the microbatches of all steps without a flush, with an update right after the last backward of each
step. A stage that is not trained ends its steps with the forward. Microbatches are numbered over the whole run.
"""

from collections.abc import Iterator
from typing import Literal, get_args

from .action import Action, Kind, Lists
from .alternating import alternate, merge, one_f_one_b
from .shape import Shape

Mode = Literal["sync", "async"]

DELAYED = "2bw"  # the name of the asynchronous schedule whose steps have several microbatches
NAMES = ("1f1b", DELAYED)
_AHEAD = 2  # microbatches by which the merged lists let a stage without backwards be ahead


def check_mode(shape: Shape, mode: str) -> None:
    """Raise `ScheduleRefused` if the schedule cannot run in `mode`."""
    if mode not in get_args(Mode):
        raise shape.refused(f'there is no mode {mode!r}; use "sync" or "async"')
    if shape.name == DELAYED and mode == "sync":
        raise shape.refused(
            "its microbatches read the weights before the newest update, which no synchronous schedule does; "
            'use mode = "async", or name = "1f1b"'
        )
    if shape.name == DELAYED and shape.microbatches < shape.stages:
        raise shape.refused(
            "it keeps two versions of the weights, which are enough where a step has at least as many microbatches as "
            f'there are stages; set microbatches = {shape.stages} or more, or use name = "1f1b"'
        )
    if mode == "async" and shape.name not in NAMES:
        raise shape.refused(
            "asynchronous mode is defined for 1f1b and 2bw (PipeDream), the others need the flush that ends a step; "
            'use name = "1f1b" or "2bw", or mode = "sync"'
        )
    if mode == "async" and shape.name != DELAYED and shape.microbatches != 1:
        raise shape.refused(
            "in asynchronous mode every microbatch is a step of its own; "
            'set microbatches = 1 (batch_size is then the size of a microbatch), name = "2bw", or mode = "sync"'
        )


def without_flush(shape: Shape, mode: Mode) -> Lists:
    """Return each worker's list for the first step; () in synchronous mode."""
    if mode == "sync":
        return ()
    return tuple(tuple(action for _, action in overlapping(shape, worker, range(1))) for worker in range(shape.workers))


def overlapping(shape: Shape, worker: int, steps: range) -> Iterator[tuple[int, Action]]:
    """Yield the actions of `worker` over asynchronous `steps`, in order, each with its step.

    Args:
        shape: Shape of the schedule.
        worker: Index of the worker.
        steps: Steps to run.
    """
    count, own = shape.microbatches, shape.placement[worker]
    numbers = range(steps.start * count, steps.stop * count)
    lists = [
        shape.trained(alternate(stage, numbers, warm_up)) for stage, warm_up in enumerate(one_f_one_b(shape.stages))
    ]
    merged = lists[own[0]] if len(own) == 1 else merge(lists, shape, _AHEAD)
    ends = [Kind.FORWARD] * shape.first_trainable + [Kind.BACKWARD] * (shape.stages - shape.first_trainable)
    for kind, stage, number in merged:
        step, microbatch = divmod(number, count)
        if stage in own:
            yield step, Action(kind, stage, microbatch)
        if stage in own and microbatch == count - 1 and kind is ends[stage]:
            yield step, Action(Kind.UPDATE, stage)
