"""A schedule that is written down: for each worker a row of cells, in the compute-only format of
torch.distributed.pipelining's CSV files.

    0F0,0F1,,,0B0,0B1     worker 0, with stage 0; while a cell is empty it waits
    ,1F0,1B0,1F1,1B1,     worker 1, with stage 1

Stages are numbered over the whole model, microbatches over the step. What ends a step stands in no cell. Of a forward
and a backward in one cell, `(0F3;3B1)OVERLAP_F_B`, the first one runs first: nothing computes two actions at once here.
`0REDUCE_GRAD`, with which torch ends some lists, counts as empty: gradients are summed where a step ends.
"""

import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from stageline.pipeline.schedule.action import Action, Kind

LISTED = "csv"  # the name of the schedule that such rows are

_ACTION = re.compile(r"(0|[1-9]\d{0,5})([FBIW])(0|[1-9]\d{0,5})")
_PAIR = re.compile(r"\(([^()]*)\)OVERLAP_F_B")
_END = re.compile(r"\d+REDUCE_GRAD")
_COMMUNICATION = re.compile(r"\d+(UNSHARD|RESHARD|SEND_[FB]|RECV_[FB])\d*")


class Listed(NamedTuple):
    """An action as it is written down: in which row and which cell of it, both from 0."""

    action: Action
    row: int
    cell: int

    def __str__(self) -> str:
        return f"{place_of(self.row, self.cell)}: {self.action}"


def place_of(row: int, cell: int) -> str:
    """A cell for people: "line 1, cell 3", both from 1."""
    return f"line {row + 1}, cell {cell + 1}"


def rows_of(text: str) -> tuple[str, ...]:
    """The rows of a CSV file, one for each line up to the last that is not empty; cells without quotes and spaces."""
    rows = [",".join(cell.strip().strip('"').strip() for cell in line.split(",")) for line in text.splitlines()]
    while rows and not rows[-1].strip(","):
        rows.pop()
    return tuple(rows)


def listed(rows: Sequence[str]) -> tuple[tuple[Listed, ...], ...]:
    """The actions of each row, without cells that are none."""
    return tuple(tuple(_actions(number, row)) for number, row in enumerate(rows))


def unknown_cells(rows: Sequence[str]) -> Iterator[str]:
    """Each cell that is neither empty nor an action, with its place."""
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
