"""The catalogue: makes a schedule by name for a shape, or refuses with the reason and the way out."""

import difflib
from collections.abc import Iterator, Sequence

from .action import Action, Kind, Lists
from .alternating import (
    alternate,
    breadth_first,
    checked_window,
    eager,
    gpipe,
    interleaved,
    merge,
    one_f_one_b,
    with_deferred_weights,
)
from .listed import LISTED, descends, faults, listed
from .replicas import NAMES as REPLICATED
from .replicas import Shares, forwards, replicas_of, replicated
from .shape import Placement, ScheduleRefused, Shape
from .v_shaped import Times, dualpipe_v, timed_zb_v, zb_v
from .value import DELAYED, Mode, Schedule

_NAMES: dict[Mode, tuple[str, ...]] = {
    "sync": ("gpipe", "1f1b", "eager-1f1b", "window", "interleaved-1f1b", "looped-bfs", "zb-h1", "zb-v", "dualpipe-v"),
    "async": ("1f1b", DELAYED),
}
_EVERY = tuple(dict.fromkeys((*_NAMES["sync"], *_NAMES["async"])))

WINDOWED = ("window", "zb-h1")  # the first needs a window, the second may have one


def schedule_names(mode: Mode = "sync") -> tuple[str, ...]:
    """The names of the catalogue that are for `mode`. Besides, `make_schedule` accepts "csv" with rows."""
    return _NAMES[mode]


def make_schedule(
    name: str,
    placement: Sequence[Sequence[int]],
    microbatches: int,
    *,
    mode: Mode = "sync",
    window: Sequence[int] | None = None,
    times: Times | None = None,
    rows: Sequence[str] | None = None,
    first_trainable: int = 0,
    shares: Shares = (),
) -> Schedule:
    """Make the schedule `name`.

    Asynchronous mode is 1F1B without a flush; its steps are single microbatches in "1f1b", and in "2bw" at least as
    many as there are stages.

    Args:
        name: One of `schedule_names`, or "csv" for rows.
        placement: Stages of each worker; with `shares`, copies as `replicas.py` numbers them.
        microbatches: Microbatches of a step.
        mode: "sync" or "async".
        window: Microbatches that each stage has in flight at most, for "window"; for "zb-h1", if not 1F1B's, those
            that it has run forward and whose gradients it has not sent.
        times: Times of F, I and W of a stage in one unit, for "zb-v", if not equally long.
        rows: What each worker runs in a step, for "csv": "0F0,0F1,,0B0,0B1", without what ends the step
            (`listed.py`).
        first_trainable: First stage that trains. Those below run no backward; those of `rows` are left out.
        shares: Shares of every stage's replicas. Empty where no stage has several.

    Raises:
        ScheduleRefused: The shape does not fit; the text gives the reason and what would work.
    """
    _check_name(name)
    shape = Shape(name, _frozen(placement), microbatches, first_trainable)
    _check_mode(shape, mode)
    if window is not None and name not in WINDOWED:
        raise shape.refused(
            'a window is for the schedules "window" and "zb-h1" alone; take it out, or use one of those'
        )
    if times is not None and name != "zb-v":
        raise shape.refused('times are for the schedule "zb-v" alone; take them out, or use that schedule')
    if (rows is not None) != (name == LISTED):
        raise shape.refused('rows are for the schedule "csv", which needs them; give both, or neither')
    if shares:
        _check_replicas(shape, shares, mode, window)
        lists = _with_updates(shape, replicated(shape, replicas_of(shares, microbatches), window))
    elif mode == "async":
        lists = _without_flush(shape)
    else:
        lists = _with_updates(shape, _lists(shape, window, times, rows or ()))
    turned = name == LISTED and descends(listed(rows or ()))
    return Schedule(name, mode, shape.placement, microbatches, lists, first_trainable, shares, descends=turned)


def forward_only(placement: Sequence[Sequence[int]], microbatches: int, shares: Shares = ()) -> Schedule:
    """Makes the schedule of evaluation: every microbatch forward through every stage, of replicas the first, and
    nothing else.

    Raises `ScheduleRefused` if the placement leaves a stage without a worker.
    """
    stages = sum(map(len, placement))
    shape = Shape("forward-only", _frozen(placement), microbatches, first_trainable=stages)
    if shares:
        lists = forwards(shape, replicas_of(shares, microbatches))
        return Schedule(shape.name, "sync", shape.placement, microbatches, lists, stages)
    lists = _alternating(shape, gpipe(stages, microbatches))
    return Schedule(shape.name, "sync", shape.placement, microbatches, lists, stages)


def _check_name(name: str) -> None:
    if name not in (*_EVERY, LISTED):
        near = difflib.get_close_matches(name, _EVERY, n=1, cutoff=0.5)
        way_out = f"did you mean {near[0]}? The" if near else "the"
        raise ScheduleRefused(f"there is no schedule named {name!r}; {way_out} names are: {', '.join(_EVERY)}")


def _check_mode(shape: Shape, mode: str) -> None:
    if mode not in ("sync", "async"):
        raise shape.refused(f'there is no mode {mode!r}; use "sync" or "async"')
    if shape.name == DELAYED:
        _check_delayed(shape, mode)
    elif mode == "async":
        _check_asynchronous(shape)


def _check_delayed(shape: Shape, mode: str) -> None:
    if mode == "sync":
        raise shape.refused(
            "its microbatches read the weights before the newest update, which no synchronous schedule does; "
            'use mode = "async", or name = "1f1b"'
        )
    if shape.microbatches < shape.stages:
        raise shape.refused(
            "it keeps two versions of the weights, which are enough where a step has at least as many microbatches as "
            f'there are stages; set microbatches = {shape.stages} or more, or use name = "1f1b"'
        )


def _check_asynchronous(shape: Shape) -> None:
    if shape.name != "1f1b":
        raise shape.refused(
            "asynchronous mode is defined for 1f1b and 2bw (PipeDream), the others need the flush that ends a step; "
            'use name = "1f1b" or "2bw", or mode = "sync"'
        )
    if shape.microbatches != 1:
        raise shape.refused(
            "in asynchronous mode every microbatch is a step of its own; "
            'set microbatches = 1 (batch_size is then the size of a microbatch), name = "2bw", or mode = "sync"'
        )


def _check_replicas(shape: Shape, shares: Shares, mode: str, window: Sequence[int] | None) -> None:
    """Raises `ScheduleRefused` for what stages with replicas cannot have."""
    if mode != "sync":
        raise shape.refused('replicas update together, at the end of a step; use mode = "sync"')
    if shape.name not in REPLICATED:
        raise shape.refused(f"stages have no replicas in it; use one of {', '.join(REPLICATED)}")
    if shape.name == "window" and (window is None or len(window) != len(shares) or min(window) < 1):
        raise shape.refused(f"the window needs one number from 1 on for each of the {len(shares)} stages")
    if not shape.stages == sum(map(len, shares)):
        raise shape.refused(f"its stages have {sum(map(len, shares))} copies in all; give each one worker")
    for stage, of_stage in enumerate(shares):
        if min(of_stage) < 1:
            raise shape.refused(f"a replica of stage {stage} has a share of {min(of_stage)}; use 1 or more")
    replicas = replicas_of(shares, shape.microbatches)
    for copy, group in enumerate(replicas.groups):
        if not group:
            raise shape.refused(
                f"stage {replicas.label(copy)} has no microbatch: shares {list(shares[replicas.stage(copy)])} deal "
                f"{shape.microbatches}; use more microbatches, or fewer replicas"
            )


def _lists(shape: Shape, window: Sequence[int] | None, times: Times | None, rows: Sequence[str]) -> Lists:
    match shape.name:
        case "gpipe":
            return _alternating(shape, gpipe(shape.stages, shape.microbatches))
        case "1f1b":
            return _alternating(shape, one_f_one_b(shape.stages))
        case "eager-1f1b":
            return _alternating(shape, eager(shape.stages))
        case "window":
            return _alternating(shape, [in_flight - 1 for in_flight in checked_window(shape, window)])
        case "looped-bfs":
            return breadth_first(shape)
        case "zb-h1":
            return _zb_h1(shape, window)
        case "zb-v":
            return zb_v(shape) if times is None else timed_zb_v(shape, times)
        case "dualpipe-v":
            return dualpipe_v(shape)
        case "csv":
            return _listed(shape, rows)
        case _:
            return interleaved(shape)


def _listed(shape: Shape, rows: Sequence[str]) -> Lists:
    """Raises `ScheduleRefused` with all that is wrong with the rows."""
    if found := faults(rows, shape):
        raise shape.refused("; ".join(found))
    return tuple(
        tuple(action for action, *_ in row if action.kind is Kind.FORWARD or action.stage >= shape.first_trainable)
        for row in listed(rows)
    )


def _alternating(shape: Shape, warm_ups: Sequence[int]) -> Lists:
    numbers = range(shape.microbatches)
    return _merged(
        shape, [alternate(stage, numbers, warm_up, shape.first_trainable) for stage, warm_up in enumerate(warm_ups)]
    )


def _zb_h1(shape: Shape, window: Sequence[int] | None) -> Lists:
    numbers, first = range(shape.microbatches), min(shape.first_trainable, shape.stages - 1)
    reached = range(shape.stages, 0, -1) if window is None else checked_window(shape, window)
    return _merged(
        shape,
        [
            with_deferred_weights(stage, numbers, each - 1, max(0, reached[first] - each), shape.first_trainable)
            for stage, each in enumerate(reached)
        ],
    )


def _merged(shape: Shape, lists: Sequence[Iterator[Action]]) -> Lists:
    if all(len(stages) == 1 for stages in shape.placement):
        return tuple(tuple(lists[stage]) for (stage,) in shape.placement)
    actions = list(merge(lists, shape.first_trainable))
    return tuple(tuple(action for action in actions if action.stage in stages) for stages in shape.placement)


def _with_updates(shape: Shape, lists: Lists) -> Lists:
    return tuple(
        (*actions, *(Action(Kind.UPDATE, stage) for stage in sorted(stages)))
        for actions, stages in zip(lists, shape.placement, strict=True)
    )


def _without_flush(shape: Shape) -> Lists:
    empty = Schedule(shape.name, "async", shape.placement, shape.microbatches, (), shape.first_trainable)
    return tuple(tuple(action for _, action in empty.program(worker, range(1))) for worker in range(shape.workers))


def _frozen(placement: Sequence[Sequence[int]]) -> Placement:
    return tuple(tuple(stages) for stages in placement)
