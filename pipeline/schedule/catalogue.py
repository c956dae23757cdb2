"""The catalogue: makes a schedule by name for a shape, or refuses with the reason and the way out."""

import difflib
from collections.abc import Iterable, Iterator, Sequence
from itertools import repeat

from .action import Action, Kind, Lists
from .alternating import alternate, breadth_first, checked_window, eager, gpipe, interleaved, merge, one_f_one_b
from .listed import LISTED, descends, faults, listed
from .replicas import Shares, with_replicas
from .shape import Placement, ScheduleRefused, Shape
from .v_shaped import Times, dualpipe_v, timed_zb_v, zb_v
from .value import Schedule
from .versions import NAMES, Mode, check_mode, without_flush

_WARM_UPS = {"gpipe": gpipe, "1f1b": one_f_one_b, "eager-1f1b": eager}  # those of all stages
_WHOLE = {"interleaved-1f1b": interleaved, "looped-bfs": breadth_first, "dualpipe-v": dualpipe_v}
WINDOWED = ("window", "zb-h1")  # the first needs a window, the second may have one
_NAMES: dict[Mode, tuple[str, ...]] = {
    "sync": (*_WARM_UPS, "window", "interleaved-1f1b", "looped-bfs", "zb-h1", "zb-v", "dualpipe-v"),
    "async": NAMES,
}
_EVERY = tuple(dict.fromkeys((*_NAMES["sync"], *_NAMES["async"])))


def schedule_names(mode: Mode = "sync") -> tuple[str, ...]:
    """Return the names of the catalogue that are for `mode`. In addition, `make_schedule` accepts "csv" with rows."""
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
        window: For "window", most microbatches that each stage has in flight. For "zb-h1", most microbatches that each
            stage has run forward without having sent their gradients; None for 1F1B's window.
        times: Times of F, I and W of a stage in one unit, for "zb-v", if not equally long.
        rows: For "csv", the row of each worker for a step: "0F0,0F1,,0B0,0B1", without updates (`listed.py`).
        first_trainable: First stage that trains. Stages below it run no backward; backwards of `rows` are left out
            there.
        shares: Shares of every stage's replicas. Empty where no stage has several.

    Raises:
        ScheduleRefused: The shape does not fit; the text gives the reason and a shape or schedule that would work.
    """
    if name not in (*_EVERY, LISTED):
        near = difflib.get_close_matches(name, _EVERY, n=1, cutoff=0.5)
        way_out = f"did you mean {near[0]}? The" if near else "the"
        raise ScheduleRefused(f"there is no schedule named {name!r}; {way_out} names are: {', '.join(_EVERY)}")
    shape = Shape(name, _frozen(placement), microbatches, first_trainable)
    check_mode(shape, mode)
    if window is not None and name not in WINDOWED:
        raise shape.refused(
            'a window is for the schedules "window" and "zb-h1" alone; take it out, or use one of those'
        )
    if times is not None and name != "zb-v":
        raise shape.refused('times are for the schedule "zb-v" alone; take them out, or use that schedule')
    if (rows is not None) != (name == LISTED):
        raise shape.refused('rows are for the schedule "csv", which needs them; give both, or neither')
    copies = with_replicas(shape, shares, mode, window)
    lists = without_flush(shape, mode) or _with_updates(shape, copies or _lists(shape, window, times, rows or ()))
    turned = name == LISTED and descends(listed(rows or ()))
    return Schedule(name, mode, shape.placement, microbatches, lists, first_trainable, shares, descends=turned)


def forward_only(placement: Sequence[Sequence[int]], microbatches: int, shares: Shares = ()) -> Schedule:
    """Make the schedule of evaluation: every microbatch runs forward through every stage.

    Of a stage with replicas, the first replica runs all microbatches.

    Args:
        placement: Stages of each worker; with `shares`, copies as `replicas.py` numbers them.
        microbatches: Microbatches of an evaluated batch.
        shares: Shares of every stage's replicas. Empty where no stage has several.

    Raises:
        ScheduleRefused: The placement leaves a stage without a worker.
    """
    copies = sum(map(len, placement))
    shape = Shape("forward-only", _frozen(placement), microbatches, first_trainable=copies)
    numbers = [range(microbatches if copy < (len(shares) or copies) else 0) for copy in range(copies)]
    lists = _merged(shape, [shape.trained(alternate(copy, each, len(each))) for copy, each in enumerate(numbers)])
    return Schedule(shape.name, "sync", shape.placement, microbatches, lists, copies)


def _lists(shape: Shape, window: Sequence[int] | None, times: Times | None, rows: Sequence[str]) -> Lists:
    """Return each worker's list for one step, without updates and without backwards of stages that do not train."""
    match shape.name:
        case name if name in _WARM_UPS:
            lists = _alternating(shape, _WARM_UPS[name](shape.stages, shape.microbatches))
        case name if name in _WHOLE:
            lists = _WHOLE[name](shape)
        case "window":
            lists = _alternating(shape, [in_flight - 1 for in_flight in checked_window(shape, window)])
        case "zb-h1":
            reached = range(shape.stages, 0, -1) if window is None else checked_window(shape, window)
            most = reached[min(shape.first_trainable, shape.stages - 1)]
            lists = _alternating(shape, [each - 1 for each in reached], [max(0, most - each) for each in reached])
        case "zb-v":
            lists = zb_v(shape) if times is None else timed_zb_v(shape, times)
        case _:
            if found := faults(rows, shape):
                raise shape.refused("; ".join(found))
            lists = tuple(tuple(action for action, *_ in row) for row in listed(rows))
    return tuple(tuple(shape.trained(actions)) for actions in lists)


def _alternating(shape: Shape, warm_ups: Sequence[int], deferred: Iterable[int | None] = repeat(None)) -> Lists:
    numbers = range(shape.microbatches)
    turns = enumerate(zip(warm_ups, deferred, strict=False))
    return _merged(shape, [shape.trained(alternate(stage, numbers, *turn)) for stage, turn in turns])


def _merged(shape: Shape, lists: Sequence[Iterator[Action]]) -> Lists:
    if all(len(stages) == 1 for stages in shape.placement):
        return tuple(tuple(lists[stage]) for (stage,) in shape.placement)
    actions = list(merge(lists, shape))
    return tuple(tuple(action for action in actions if action.stage in stages) for stages in shape.placement)


def _with_updates(shape: Shape, lists: Lists) -> Lists:
    return tuple(
        (*actions, *(Action(Kind.UPDATE, stage) for stage in sorted(stages)))
        for actions, stages in zip(lists, shape.placement, strict=True)
    )


def _frozen(placement: Sequence[Sequence[int]]) -> Placement:
    return tuple(tuple(stages) for stages in placement)
