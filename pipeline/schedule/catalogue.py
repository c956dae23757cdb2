"""The catalogue: makes a schedule of a name for a shape, or refuses with the reason and the way out."""

import difflib
from collections.abc import Iterable, Sequence
from itertools import pairwise

from .action import Action, Kind
from .alternating import alternate, eager, gpipe, one_f_one_b
from .interleaved import group_of, interleave, nearest
from .merge import merge
from .shape import Shape
from .value import Mode, Placement, Schedule, ScheduleRefused

_NAMES = ("gpipe", "1f1b", "eager-1f1b", "window", "interleaved-1f1b")

Lists = tuple[tuple[Action, ...], ...]  # of each worker, for one step


def names() -> tuple[str, ...]:
    """The names that `make` knows."""
    return _NAMES


def make(
    name: str,
    placement: Sequence[Sequence[int]],
    microbatches: int,
    *,
    mode: Mode = "sync",
    window: Sequence[int] | None = None,
    first_trainable: int = 0,
) -> Schedule:
    """The schedule `name` for the stages that each worker owns (`placement`) and the microbatches of a step.

    `window` is for the schedule of that name: how many microbatches each stage has in flight at most. Stages below
    `first_trainable` run no backward. Asynchronous mode is 1F1B without a flush; its steps are single microbatches.
    Raises ScheduleRefused, whose text says why and what would work.
    """
    shape = _checked(name, placement, microbatches, mode, window, first_trainable)
    if mode == "async":
        return _asynchronous(shape, first_trainable)
    if name == "interleaved-1f1b":
        lists = _interleaved(shape, first_trainable)
    else:
        lists = _alternating(shape, _warm_ups(shape, window), first_trainable)
    lists = tuple((*actions, *_updates(stages)) for actions, stages in zip(lists, shape.placement, strict=True))
    return Schedule(name, mode, shape.placement, microbatches, lists, first_trainable)


def forward_only(placement: Sequence[Sequence[int]], microbatches: int) -> Schedule:
    """Every microbatch forward through every stage, and nothing else: for evaluation."""
    shape = Shape("forward-only", _frozen(placement), microbatches)
    shape.check()
    lists = _alternating(shape, gpipe(shape.stages, microbatches), shape.stages)
    return Schedule(shape.name, "sync", shape.placement, microbatches, lists, shape.stages)


def _checked(
    name: str,
    placement: Sequence[Sequence[int]],
    microbatches: int,
    mode: Mode,
    window: Sequence[int] | None,
    first_trainable: int,
) -> Shape:
    shape = Shape(name, _frozen(placement), microbatches)
    _check_name(name)
    shape.check()
    _check_mode(shape, mode)
    if window is not None and name != "window":
        raise shape.refused('a window is for the schedule "window" alone; take it out, or name that schedule')
    if not 0 <= first_trainable <= shape.stages:
        raise shape.refused(f"the first trainable stage is {first_trainable}; it must be one of 0 to {shape.stages}")
    return shape


def _check_name(name: str) -> None:
    if name not in _NAMES:
        near = difflib.get_close_matches(name, _NAMES, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]}? " if near else ""
        raise ScheduleRefused(f"there is no schedule named {name!r}; {hint}The names are: {', '.join(_NAMES)}")


def _check_mode(shape: Shape, mode: str) -> None:
    if mode == "sync":
        return
    if mode != "async":
        raise shape.refused(f'there is no mode {mode!r}; use "sync" or "async"')
    if shape.name != "1f1b":
        raise shape.refused(
            "asynchronous mode is defined for 1f1b alone (PipeDream), the others live from the flush that ends a step; "
            'use name = "1f1b", or mode = "sync"'
        )
    if shape.microbatches != 1:
        raise shape.refused(
            "in asynchronous mode every microbatch is a step of its own; "
            'set microbatches = 1 (batch_size is then the size of a microbatch), or mode = "sync"'
        )


def _asynchronous(shape: Shape, first_trainable: int) -> Schedule:
    overlapping = Schedule(shape.name, "async", shape.placement, 1, (), first_trainable)
    lists = tuple(
        tuple(action for _, action in overlapping.program(worker, range(1))) for worker in range(shape.workers)
    )
    return Schedule(shape.name, "async", shape.placement, 1, lists, first_trainable)


def _warm_ups(shape: Shape, window: Sequence[int] | None) -> list[int]:
    match shape.name:
        case "gpipe":
            return gpipe(shape.stages, shape.microbatches)
        case "1f1b":
            return one_f_one_b(shape.stages)
        case "eager-1f1b":
            return eager(shape.stages)
        case _:
            return [in_flight - 1 for in_flight in _checked_window(shape, window)]


def _checked_window(shape: Shape, window: Sequence[int] | None) -> Sequence[int]:
    if window is None or len(window) != shape.stages:
        given = "none is given" if window is None else f"it has {len(window)}"
        example = f"({', '.join(str(shape.stages - stage) for stage in range(shape.stages))}) is 1F1B's"
        raise shape.refused(f"the window needs one number for each stage, and {given}; {example}")
    for stage, in_flight in enumerate(window):
        if in_flight < 1:
            raise shape.refused(f"stage {stage}'s window is {in_flight}; at least 1 microbatch must be in flight")
    for stage, (here, next_stage) in enumerate(pairwise(min(shape.microbatches, number) for number in window)):
        if here < next_stage:
            raise shape.refused(
                f"stage {stage} stops at {here} in flight and waits for a gradient, while stage {stage + 1} waits for "
                f"forward number {next_stage} before it sends one; no stage's window may be below the next one's"
            )
    return window


def _alternating(shape: Shape, warm_ups: Sequence[int], first_trainable: int) -> Lists:
    numbers = range(shape.microbatches)
    turns = [alternate(stage, numbers, warm_up, first_trainable) for stage, warm_up in enumerate(warm_ups)]
    actions = [Action(turn.kind, turn.stage, turn.number) for turn in merge(turns, first_trainable)]
    return tuple(tuple(action for action in actions if action.stage in stages) for stages in shape.placement)


def _interleaved(shape: Shape, first_trainable: int) -> Lists:
    looped = tuple(tuple(range(worker, shape.stages, shape.workers)) for worker in range(shape.workers))
    if tuple(tuple(sorted(stages)) for stages in shape.placement) != looped or shape.stages % shape.workers:
        raise shape.refused(_not_looped(shape))
    group = group_of(shape.workers, shape.microbatches)
    if group is None:
        raise shape.refused(_not_in_groups(shape))
    turns = shape.stages // shape.workers
    return tuple(
        _trained(interleave(worker, shape.workers, turns, shape.microbatches, group), first_trainable)
        for worker in range(shape.workers)
    )


def _not_looped(shape: Shape) -> str:
    if shape.stages % shape.workers:
        way_out = f"use a multiple of {shape.workers} stages"
    else:
        looped = [list(range(worker, shape.stages, shape.workers)) for worker in range(shape.workers)]
        way_out = f"place the stages as {looped}"
    return f"stages must loop over the workers (worker r of P owns r, P + r, ...); {way_out}, or use 1f1b"


def _not_in_groups(shape: Shape) -> str:
    rounds = shape.microbatches // shape.workers
    working = " and ".join(map(str, nearest(shape.workers, shape.microbatches)))
    return (
        f"{shape.microbatches} microbatches do not divide into {rounds} rounds; "
        f"the nearest numbers that work on {shape.workers} workers are {working}"
    )


def _trained(actions: Iterable[Action], first_trainable: int) -> tuple[Action, ...]:
    return tuple(action for action in actions if action.kind is Kind.FORWARD or action.stage >= first_trainable)


def _updates(stages: Iterable[int]) -> tuple[Action, ...]:
    return tuple(Action(Kind.UPDATE, stage) for stage in sorted(stages))


def _frozen(placement: Sequence[Sequence[int]]) -> Placement:
    return tuple(tuple(stages) for stages in placement)
