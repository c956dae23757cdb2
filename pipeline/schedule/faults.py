"""What is wrong with a schedule that is written down, each with its line and cell.

Cells that are no actions, then rows that are not those of the placement, then what is missing or repeated, then what
is in a wrong order, then workers that wait for each other for ever: each is looked for where those before are right.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain, groupby

from stageline.pipeline.schedule.action import Action, Kind
from stageline.pipeline.schedule.precedence import AFTER_PREVIOUS, BUILDS_ON
from stageline.pipeline.schedule.shape import Placement, ScheduleRefused, Shape

from stageline.pipeline.schedule.rows import Listed, listed, place_of, unknown_cells
from .waits import deadlock

_Rows = Sequence[Sequence[Listed]]

_SHOWN = 3  # actions that one fault names
_BACKWARDS = (Kind.BACKWARD, Kind.INPUT, Kind.WEIGHT)


def faults(rows: Sequence[str], shape: Shape) -> list[str]:
    """Everything of the first kind of which anything is wrong; empty for rows that can be run."""
    found = listed(rows)
    checks: tuple[Callable[[], Iterator[str]], ...] = (
        lambda: unknown_cells(rows),
        lambda: _shared(found),
        lambda: _placed(found, shape.placement),
        lambda: _counted(found, shape.microbatches),
        lambda: _repeated(found),
        lambda: _missing(found, shape),
        lambda: _disordered(found),
        lambda: deadlock(found),
    )
    return next((wrong for check in checks if (wrong := list(check()))), [])


def descends(rows: _Rows) -> bool:
    """Return True if every stage runs the backwards of a step in descending order of microbatches."""
    orders: dict[tuple[int, str], list[int]] = {}
    for action in (each.action for row in rows for each in row if each.action.kind in _BACKWARDS):
        orders.setdefault((action.stage, action.kind), []).append(action.microbatch)
    found = list(orders.values())
    return any(len(order) > 1 for order in found) and all(order == sorted(order, reverse=True) for order in found)


def told_by(rows: Sequence[str]) -> tuple[Placement, int]:
    """The stages of each worker, and the microbatches of a step, by the rows alone. Raises `ScheduleRefused` for cells
    that are no actions, and for a stage on two rows."""
    found = listed(rows)
    if wrong := list(unknown_cells(rows)) or list(_shared(found)):
        raise ScheduleRefused("; ".join(wrong))
    highest = max((each.action.microbatch for row in found for each in row), default=0)
    return tuple(tuple(sorted({each.action.stage for each in row})) for row in found), highest + 1


def _shared(rows: _Rows) -> Iterator[str]:
    """The first action, on a further row, of a stage that an earlier row has."""
    owners: dict[int, Listed] = {}
    told: set[tuple[int, int]] = set()
    for each in chain.from_iterable(rows):
        stage = each.action.stage
        first = owners.setdefault(stage, each)
        if first.row != each.row and (stage, each.row) not in told:
            told.add((stage, each.row))
            yield (
                f"{each}: stage {stage} is on line {first.row + 1}, too ({first.action} in cell {first.cell + 1}); a "
                f"stage has one worker, so one row"
            )


def _placed(rows: _Rows, placement: Placement) -> Iterator[str]:
    here = [sorted({each.action.stage for each in row}) for row in rows]
    if here != [sorted(stages) for stages in placement]:
        yield (
            f"its rows have the stages {_spelled(here)}, and the workers {_spelled(placement)}: there is a row for "
            f"each worker, with the worker's stages; set workers.N.stages, or change the rows"
        )


def _spelled(placement: Sequence[Sequence[int]]) -> str:
    return str([list(stages) for stages in placement])


def _counted(rows: _Rows, microbatches: int) -> Iterator[str]:
    highest = max(chain.from_iterable(rows), key=lambda each: each.action.microbatch)
    there = highest.action.microbatch + 1
    if there > microbatches:
        yield (
            f"{highest}: a step has {microbatches} microbatches, and they are numbered from 0; for this file set "
            f"schedule.microbatches = {there}"
        )


def _repeated(rows: _Rows) -> Iterator[str]:
    first: dict[Action, Listed] = {}
    for each in chain.from_iterable(rows):
        earlier = first.setdefault(each.action, each)
        whole = first.get(each.action._replace(kind=Kind.BACKWARD))
        if earlier is not each:
            yield f"{each} stands in cell {earlier.cell + 1}, too; it runs once"
        elif whole and each.action.kind in (Kind.INPUT, Kind.WEIGHT):
            yield f"{each} is a half of {whole.action} in cell {whole.cell + 1}; keep the halves, or the whole"
        elif each.action.kind is Kind.BACKWARD:
            halves = (first.get(each.action._replace(kind=kind)) for kind in (Kind.INPUT, Kind.WEIGHT))
            for half in filter(None, halves):
                yield f"{each} has its half {half.action} in cell {half.cell + 1}; keep the halves, or the whole"


def _missing(rows: _Rows, shape: Shape) -> Iterator[str]:
    for number, row in enumerate(rows):
        there = {each.action for each in row}
        lost = [
            action
            for stage in sorted(shape.placement[number])
            for microbatch in range(shape.microbatches)
            for action in _wanted(stage, microbatch, there)
            if action not in there
        ]
        if lost:
            named, more = ", ".join(map(str, lost[:_SHOWN])), len(lost) - _SHOWN
            verb = "are" if len(lost) > 1 else "is"
            yield (
                f"line {number + 1}: {named}{f' and {more} more' if more > 0 else ''} {verb} missing; a step has "
                f"microbatches 0 to {shape.microbatches - 1}, each with F and B, or F, I and W"
            )


def _wanted(stage: int, microbatch: int, there: set[Action]) -> Iterator[Action]:
    halves = [Action(kind, stage, microbatch) for kind in (Kind.INPUT, Kind.WEIGHT)]
    yield Action(Kind.FORWARD, stage, microbatch)
    yield from halves if there & {*halves} else [Action(Kind.BACKWARD, stage, microbatch)]


def _disordered(rows: _Rows) -> Iterator[str]:
    """The first fault of each stage; the others follow from it most often."""
    back = -1 if descends(rows) else 1
    for row in rows:
        places = {each.action: place for place, each in enumerate(row)}
        wrong = sorted(_later_than_needed(row, places, back), key=lambda pair: pair[0].action.stage)
        for _, pairs in groupby(wrong, key=lambda pair: pair[0].action.stage):
            each, needed = next(pairs)
            yield (
                f"{each} comes before {needed.action} ({place_of(needed.row, needed.cell)}), "
                f"{_why(each.action, needed.action)}"
            )


def _later_than_needed(
    row: Sequence[Listed], places: Mapping[Action, int], back: int
) -> Iterator[tuple[Listed, Listed]]:
    for place, each in enumerate(row):
        for needed in _needed(each.action, back):
            if places.get(needed, -1) > place:
                yield each, row[places[needed]]


def _needed(action: Action, back: int) -> Iterator[Action]:
    """What comes before `action` at its stage. `back`: by how much the backward before it has a lower microbatch."""
    apart = back if action.kind in _BACKWARDS else 1
    for kind in BUILDS_ON.get(action.kind, ()):
        yield action._replace(kind=kind)
    for kind in AFTER_PREVIOUS[action.kind]:
        yield action._replace(kind=kind, microbatch=action.microbatch - apart)


def _why(action: Action, needed: Action) -> str:
    if action.microbatch == needed.microbatch:
        return "which it builds on"
    what = "gradients are added" if action.kind in _BACKWARDS else "messages are numbered"
    return f"and {what} in one order of microbatches: swap them"
