"""A timetable as text: a row for each worker, a cell for each action, as wide as the action is long.

          0              5           idle
worker 0  F0 F1       B0███    B1███  33%
worker 1     F0 B0███ F1 B1███        33%
"""

import math
from collections.abc import Callable, Sequence

from stageline.pipeline.program import Timed
from stageline.pipeline.schedule import Kind

from .sheet import OTHER, WORDS, Sheet

_WIDEST = 400  # columns, where no width is given: wider ones cannot be read

_ASCII: dict[str, str] = {
    Kind.FORWARD: "-",
    Kind.BACKWARD: "=",
    Kind.INPUT: "~",
    Kind.WEIGHT: "+",
    Kind.TIED: "t",
    Kind.SUBTOTAL: "s",
    Kind.ADD: "a",
    Kind.NORMS: "n",
    Kind.CLIP: "c",
    Kind.UPDATE: "u",
}
_UNICODE: dict[str, str] = {
    Kind.FORWARD: "░",
    Kind.BACKWARD: "█",
    Kind.INPUT: "▓",
    Kind.WEIGHT: "▒",
    Kind.TIED: "▀",
    Kind.SUBTOTAL: "▚",
    Kind.ADD: "▘",
    Kind.NORMS: "▝",
    Kind.CLIP: "▗",
    Kind.UPDATE: "▄",
}

_OTHER = ":"  # fills the cells of other kinds


def draw_text(
    timed: Sequence[Timed],
    *,
    width: int | None = None,
    ascii_only: bool = False,
    seconds: bool = False,
    stage: Callable[[int], str] = str,
) -> str:
    """The actions as lines of at most `width` columns, if that leaves room for any; by default as wide as labels need.

    A cell that is too narrow for its label is filled with the pattern of its kind. Times are in seconds or
    in the unit of a plan's costs. `stage` gives a stage's name.
    """
    sheet = Sheet(timed, seconds=seconds, stage=stage)
    if not sheet.span:
        return "no action took any time"
    names = [f"worker {worker}  " for worker in range(len(sheet.rows))]
    margin = max(map(len, names))
    columns = _Columns(sheet, _WIDEST if width is None else max(1, width - margin - len(_IDLE)))
    fills = _ASCII if ascii_only else _UNICODE
    rows = [_row(sheet, row, columns, fills) for row in sheet.rows]
    return "\n".join(
        (
            " " * margin + _axis(sheet, columns) + _IDLE,
            *(
                f"{name:{margin}}{row} {sheet.idle(worker):3.0%}"
                for worker, (name, row) in enumerate(zip(names, rows, strict=True))
            ),
            " " * margin
            + "   ".join(f"{kind}{fills.get(kind, _OTHER) * 2} {WORDS.get(kind, OTHER)}" for kind in sheet.kinds),
        )
    )


_IDLE = "idle"  # above the shares


class _Columns:
    """Turns times into columns. `gap` is the number of free columns at the end of a cell.

    The shortest action gets its label and a gap, else its label, else one column, else what `room` leaves it.
    """

    def __init__(self, sheet: Sheet, room: int) -> None:
        label = max(len(sheet.label(each)) for row in sheet.rows for each in row)
        widest = room / sheet.span * sheet.shortest
        shortest = next((wanted for wanted in (label + 1, label, 1) if wanted <= widest), widest)
        self._start = sheet.start
        self._per_time = shortest / sheet.shortest
        self.number = round(sheet.span * self._per_time)
        self.gap = int(shortest != label)

    def of(self, time: float) -> int:
        """The column of a time. Halves are rounded up, so that actions of one length have one width anywhere."""
        return math.floor((time - self._start) * self._per_time + 0.5 + 1e-6)


def _row(sheet: Sheet, row: Sequence[Timed], columns: _Columns, fills: dict[str, str]) -> str:
    line = ""
    for each in row:
        line = line.ljust(columns.of(each.start))
        cell = columns.of(each.end) - len(line)
        line += _cell(sheet.label(each), cell, columns.gap, fills.get(each.action.kind, _OTHER))
    return line.ljust(columns.number)


def _cell(label: str, width: int, gap: int, fill: str) -> str:
    if width < len(label) + gap:
        return fill * width
    return label.ljust(width - gap, fill) + " " * gap


def _axis(sheet: Sheet, columns: _Columns) -> str:
    line = ""
    for tick in sheet.ticks(most=max(1, columns.number // 10)):
        column, time = columns.of(sheet.start + tick), sheet.time(tick)
        if column + len(time) <= columns.number:
            line = line.ljust(column) + time
    return line.ljust(columns.number)
