"""Schedules written down as rows: for each worker a row of cells, in torch's CSV format.

The format is the compute-only one of torch.distributed.pipelining:

    0F0,0F1,,,0B0,0B1     worker 0, with stage 0; while a cell is empty it waits
    ,1F0,1B0,1F1,1B1,     worker 1, with stage 1

Stages are numbered over the whole model, microbatches over the step. What ends a step stands in no cell. Of a forward
and a backward in one cell, `(0F3;3B1)OVERLAP_F_B`, the first one runs first: nothing computes two actions at once here.
`0REDUCE_GRAD`, with which torch ends some lists, counts as empty: gradients are summed where a step ends.

Faults are searched in this order, and those of the first kind found are reported, with line and cell:

1. cells that are no actions
2. rows that do not match the placement
3. actions that are missing or repeated
4. actions in a wrong order
5. workers that wait for each other for ever
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain, groupby
from typing import NamedTuple

from .action import AFTER_PREVIOUS, BUILDS_ON, Action, Kind
from .shape import Placement, ScheduleRefused, Shape

LISTED = "csv"  # the name of the schedule that such rows are

_ACTION = re.compile(r"(0|[1-9]\d{0,5})([FBIW])(0|[1-9]\d{0,5})")
_PAIR = re.compile(r"\(([^()]*)\)OVERLAP_F_B")
_END = re.compile(r"\d+REDUCE_GRAD")
_COMMUNICATION = re.compile(r"\d+(UNSHARD|RESHARD|SEND_[FB]|RECV_[FB])\d*")
_SHOWN = 3  # actions that one fault names
_BACKWARDS = (Kind.BACKWARD, Kind.INPUT, Kind.WEIGHT)


class Listed(NamedTuple):
    """An action as written down, with its row and its cell in the row, both counted from 0."""

    action: Action
    row: int
    cell: int

    def __str__(self) -> str:
        """Return the place and the action for people: "line 1, cell 3: 0B0"."""
        return f"{place_of(self.row, self.cell)}: {self.action}"


_Rows = Sequence[Sequence[Listed]]


def place_of(row: int, cell: int) -> str:
    """Return a cell for people, both numbers counted from 1: "line 1, cell 3"."""
    return f"line {row + 1}, cell {cell + 1}"


def rows_of(text: str) -> tuple[str, ...]:
    """Return the rows of a CSV file, one for each line up to the last that is not empty.

    Cells are separated by commas; quotes and spaces around their texts are removed. An empty line between others
    is an empty row.
    """
    rows = [",".join(cell.strip().strip('"').strip() for cell in line.split(",")) for line in text.splitlines()]
    while rows and not rows[-1].strip(","):
        rows.pop()
    return tuple(rows)


def listed(rows: Sequence[str]) -> tuple[tuple[Listed, ...], ...]:
    """Return the actions of each row, leaving out cells that are no actions."""
    return tuple(tuple(_actions(number, row)) for number, row in enumerate(rows))


def unknown_cells(rows: Sequence[str]) -> Iterator[str]:
    """Yield each cell that is neither empty nor an action, with its place."""
    for number, row in enumerate(rows):
        for place, cell in enumerate(row.split(",")):
            if any(_ACTION.fullmatch(part) is None for part in _parts(cell)):
                yield f'{place_of(number, place)}: "{cell}" {_meant(cell)}'


def _actions(number: int, row: str) -> Iterator[Listed]:
    for place, cell in enumerate(row.split(",")):
        for part in _parts(cell):
            if found := _ACTION.fullmatch(part):
                yield Listed(Action(Kind(found[2]), int(found[1]), int(found[3])), number, place)


def _parts(cell: str) -> Sequence[str]:
    pair = _PAIR.fullmatch(cell)
    empty = not cell or _END.fullmatch(cell)
    return pair[1].split(";") if pair else [cell] * (not empty)


def _meant(cell: str) -> str:
    if _COMMUNICATION.fullmatch(cell):
        return 'is a communication, which follows from the computations here; write the file as "compute_only"'
    return "is no action; write the stage, one of F, B, I and W, and the microbatch, such as 0F0, or leave it empty"


def deadlock(rows: _Rows) -> Iterator[str]:
    """Yield the circle in which workers wait, as a chain of actions; nothing if there is none.

    The rows must have every action of every stage.
    """
    places = {each.action: each for row in rows for each in row}
    heads = _stuck(rows, places)
    if heads:
        yield _chain(_circle(heads, places), places)


def _stuck(rows: _Rows, places: Mapping[Action, Listed]) -> dict[int, Listed]:
    """Return, by worker, the action at which the worker waits for ever."""
    ran: set[Action] = set()
    heads = [0] * len(rows)
    moves = True
    while moves:
        moves = False
        for worker, row in enumerate(rows):
            while heads[worker] < len(row) and _source(row[heads[worker]].action, places) in {None} | ran:
                ran.add(row[heads[worker]].action)
                heads[worker] += 1
                moves = True
    return {worker: row[heads[worker]] for worker, row in enumerate(rows) if heads[worker] < len(row)}


def _source(action: Action, places: Mapping[Action, Listed]) -> Action | None:
    """Return the action of a neighbouring stage whose message `action` takes, None for none."""
    if action.kind is Kind.WEIGHT:
        return None
    forward = action.kind is Kind.FORWARD
    kinds = [Kind.FORWARD] if forward else [Kind.BACKWARD, Kind.INPUT]
    stage = action.stage - 1 if forward else action.stage + 1
    found = (action._replace(kind=kind, stage=stage) for kind in kinds)
    return next((each for each in found if each in places), None)


def _circle(heads: Mapping[int, Listed], places: Mapping[Action, Listed]) -> list[Listed]:
    """Return the actions at which workers wait, each for the worker of the next one, the last for the first."""
    way: list[int] = []
    worker = min(heads)
    while worker not in way:
        way.append(worker)
        worker = _wanted_by(heads[worker], places).row
    return [heads[each] for each in way[way.index(worker) :]]


def _wanted_by(head: Listed, places: Mapping[Action, Listed]) -> Listed:
    source = _source(head.action, places)
    if source is None:
        raise AssertionError(f"{head} takes no message, so no worker waits at it")
    return places[source]


def _chain(circle: Sequence[Listed], places: Mapping[Action, Listed]) -> str:
    parts = []
    for head, following in zip(circle, (*circle[1:], circle[0]), strict=True):
        wanted = _wanted_by(head, places)
        behind = "" if wanted == following else f", which comes after {following.action} on worker {following.row}"
        parts.append(f"waits for {wanted.action}{behind}")
    return f"{circle[0]} {', which '.join(parts)}: none of them ever runs; change their order"


def faults(rows: Sequence[str], shape: Shape) -> list[str]:
    """Return all faults of the first kind that is found; empty for rows that can be run."""
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
    """Return the stages of each worker and the microbatches of a step, read from the rows alone.

    Raises:
        ScheduleRefused: A cell is no action, or a stage is on two rows.
    """
    found = listed(rows)
    if wrong := list(unknown_cells(rows)) or list(_shared(found)):
        raise ScheduleRefused("; ".join(wrong))
    highest = max((each.action.microbatch for row in found for each in row), default=0)
    return tuple(tuple(sorted({each.action.stage for each in row})) for row in found), highest + 1


def _shared(rows: _Rows) -> Iterator[str]:
    """Yield, for each further row of a stage that an earlier row has, the stage's first action there."""
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
    """Yield the first fault of each stage; the stage's other faults mostly follow from it."""
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
    """Yield the actions that come before `action` at its stage.

    Args:
        action: The action.
        back: Amount by which the microbatch of the backward before is lower: 1, or -1 if backwards descend.
    """
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
