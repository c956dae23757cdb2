"""Drawings of a timetable, planned or measured: as text for a terminal, as a standalone SVG image for a page.

Text has a row for each worker and a cell for each action, as wide as the action is long:

          0              5           idle
worker 0  F0 F1       B0███    B1███  33%
worker 1     F0 B0███ F1 B1███        33%

An image follows the reader's light or dark theme. Hovering an action shows its details.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from html import escape
from typing import NamedTuple

from stageline.pipeline.program import Timed
from stageline.pipeline.schedule import ONCE_PER_STEP, Kind


class Look(NamedTuple):
    """Appearance of one kind of action.

    `word` names it; `ascii` and `blocks` fill its cells; `light` and `dark` are its tones in either theme, one for each
    stage of a worker, in CSS notation.
    """

    word: str
    ascii: str
    blocks: str
    light: Sequence[str] = ()
    dark: Sequence[str] = ()


_GREEN = ("#8fd0c4", "#c6e8e1", "#5fb8a8", "#e0f3ef"), ("#2b7a6d", "#1d544b", "#3f988a", "#163f38")
_SAND = ("#d6c98a", "#ebe3bd", "#c2b25f", "#f5f0da"), ("#857428", "#5c501b", "#a08d3a", "#463d14")

# A hue for each kind of action. Blue and orange can be told apart without seeing red or green.
LOOKS: dict[str, Look] = {
    Kind.FORWARD: Look(
        "forward",
        *("-", "░"),
        ("#9cc7f7", "#cde2fb", "#6facee", "#e3effd"),
        ("#2f6db5", "#1f4a80", "#4787d3", "#183862"),
    ),
    Kind.BACKWARD: Look(
        "backward",
        *("=", "█"),
        ("#f8b76f", "#fcd9b0", "#ee9a45", "#fdeada"),
        ("#b4611c", "#824411", "#cf7a30", "#65340c"),
    ),
    Kind.INPUT: Look(
        "input gradient",
        *("~", "▓"),
        ("#f49b8f", "#f9c8c1", "#e97767", "#fce3df"),
        ("#b0433a", "#7d2d26", "#c95c52", "#60211c"),
    ),
    Kind.WEIGHT: Look(
        "weight gradient",
        *("+", "▒"),
        ("#c7b3f0", "#e0d5f8", "#a98de4", "#eee8fb"),
        ("#6f51b5", "#4d3785", "#896dcb", "#3a2966"),
    ),
    Kind.TIED: Look("gradients of shared parameters", "t", "▀", *_GREEN),
    Kind.SUBTOTAL: Look("sum of gradients of shared parameters", "s", "▚", *_GREEN),
    Kind.ADD: Look("sums for other replicas", "a", "▘"),
    Kind.NORMS: Look("norms of gradients", "n", "▝", *_SAND),
    Kind.CLIP: Look("clipping", "c", "▗", *_SAND),
    Kind.UPDATE: Look(
        "update",
        *("u", "▄"),
        ("#aab4be", "#ccd3da", "#8b97a3", "#e1e5e9"),
        ("#5b6570", "#3f474f", "#737e89", "#30363d"),
    ),
}
OTHER = Look("an operation of a feature", ":", ":")


class _Sheet:
    """Timetable to draw. Times are in seconds if `seconds` is set, else in the unit of a plan's costs.

    `rows` holds each worker's actions by start, without those that take no time; `stages` the stages of each worker
    that have run; `shortest` is the duration of the shortest action. `stage` names a stage, of which several workers
    may have replicas.
    """

    def __init__(self, timed: Sequence[Timed], *, seconds: bool, stage: Callable[[int], str] = str) -> None:
        self.stage = stage
        self.seconds = seconds
        workers = range(max((each.worker for each in timed), default=-1) + 1)
        seen = sorted((each for each in timed if each.end > each.start), key=lambda each: each.start)
        self.rows = [[each for each in seen if each.worker == worker] for worker in workers]
        self.stages = [sorted({each.action.stage for each in timed if each.worker == worker}) for worker in workers]
        kinds = {each.action.kind for each in seen}
        order = [*(kind for kind in LOOKS if kind in kinds), *sorted(kinds - LOOKS.keys())]
        self.looks = {kind: LOOKS.get(kind, OTHER) for kind in order}
        self.start = min((each.start for each in timed), default=0.0)
        self.span = max((each.end for each in timed), default=0.0) - self.start
        self.shortest = min((each.end - each.start for each in seen), default=1.0)
        self._several_stages = any(len(stages) > 1 for stages in self.stages)
        self._steps_of_one = all(each.action.microbatch == 0 for each in timed)

    def idle(self, worker: int) -> float:
        """Return the share of the span in which `worker` computes nothing."""
        return 1 - sum(each.end - each.start for each in self.rows[worker]) / self.span if self.span else 0.0

    def label(self, each: Timed) -> str:
        """Return `F3`, or `2F3` if some worker has more than one stage; the number as `number` returns it."""
        stage = self.stage(each.action.stage) if self._several_stages else ""
        number = "" if each.action.kind in ONCE_PER_STEP else str(self.number(each))
        return f"{stage}{each.action.kind}{number}"

    def number(self, each: Timed) -> int:
        """Return the number of an action's microbatch, or of its step if each step has one microbatch."""
        return each.step if self._steps_of_one else each.action.microbatch

    def ticks(self, most: int) -> list[float]:
        """Return about `most` round times since the start at most, one or two or five times a power of ten apart."""
        if not self.span:
            return [0.0]
        apart = 10 ** math.floor(math.log10(self.span / most))
        apart *= next(factor for factor in (1, 2, 5, 10, 20) if self.span / (apart * factor) <= most)
        return [apart * tick for tick in range(math.floor(self.span / apart + 1e-9) + 1)]

    def time(self, time: float) -> str:
        """Return a time since the start as text, with its unit."""
        if not self.seconds:
            return f"{time:.6g}"
        for unit, factor in (("s", 1), ("ms", 1e3)):
            if self.span * factor >= 1:
                return f"{time * factor:.4g} {unit}"
        return f"{time * 1e6:.4g} µs"


_WIDEST_TEXT = 400  # columns, where no width is given: wider ones cannot be read
_IDLE_TITLE = "idle"  # above the shares


def draw_text(
    timed: Sequence[Timed],
    *,
    width: int | None = None,
    ascii_only: bool = False,
    seconds: bool = False,
    stage: Callable[[int], str] = str,
) -> str:
    """Return a drawing of actions as lines of text. A cell too narrow for its label has the pattern of its kind.

    Args:
        timed: Actions with their times.
        width: Number of columns at most, if that leaves room for any; as many as labels need by default.
        ascii_only: Use no block characters.
        seconds: Times are in seconds; in the unit of a plan's costs by default.
        stage: Returns a stage's name.
    """
    sheet = _Sheet(timed, seconds=seconds, stage=stage)
    if not sheet.span:
        return "no action took any time"
    names = [f"worker {worker}  " for worker in range(len(sheet.rows))]
    margin = max(map(len, names))
    columns = _Columns(sheet, _WIDEST_TEXT if width is None else max(1, width - margin - len(_IDLE_TITLE)))
    fills = {kind: look.ascii if ascii_only else look.blocks for kind, look in sheet.looks.items()}
    legend = "   ".join(f"{kind}{fills[kind] * 2} {look.word}" for kind, look in sheet.looks.items())
    rows = (
        f"{name:{margin}}{columns.row(sheet.rows[worker], fills)} {sheet.idle(worker):3.0%}"
        for worker, name in enumerate(names)
    )
    return "\n".join((" " * margin + columns.axis() + _IDLE_TITLE, *rows, " " * margin + legend))


class _Columns:
    """Columns of the times of `sheet`, and lines of them.

    The shortest action gets its label and a gap of free columns after it, else its label, else one column, else what
    `room` leaves it.
    """

    def __init__(self, sheet: _Sheet, room: int) -> None:
        label = max(len(sheet.label(each)) for row in sheet.rows for each in row)
        widest = room / sheet.span * sheet.shortest
        shortest = next((wanted for wanted in (label + 1, label, 1) if wanted <= widest), widest)
        self._sheet = sheet
        self._per_time = shortest / sheet.shortest
        self._count = round(sheet.span * self._per_time)
        self._gap = int(shortest != label)

    def row(self, actions: Sequence[Timed], fills: dict[str, str]) -> str:
        """Return the line of a worker's actions."""
        line = ""
        for each in actions:
            line = line.ljust(self._of(each.start - self._sheet.start))
            label, width = self._sheet.label(each), self._of(each.end - self._sheet.start) - len(line)
            fill = fills[each.action.kind]
            fits = width >= len(label) + self._gap
            line += label.ljust(width - self._gap, fill) + " " * self._gap if fits else fill * width
        return line.ljust(self._count)

    def axis(self) -> str:
        """Return the line of times."""
        line = ""
        for tick in self._sheet.ticks(most=max(1, self._count // 10)):
            column, time = self._of(tick), self._sheet.time(tick)
            if column + len(time) <= self._count:
                line = line.ljust(column) + time
        return line.ljust(self._count)

    def _of(self, time: float) -> int:
        """Return the column of a time since the start. Halves are rounded up: actions of one length have one width."""
        return math.floor(time * self._per_time + 0.5 + 1e-6)


# All in pixels.
_EDGE = 24  # free around everything
_NAMES, _IDLE = 78, 70  # left and right of the rows
_TITLE = 52  # above the rows
_ROW, _BAR = 38, 30  # from row to row, and how much of it an action takes
_TIMES = 26  # below the rows
_SPACIOUS = 12  # what the shortest action gets beside its label, where rows have the room
_LETTER = 7.5
_NARROWEST, _WIDEST = 420, 880  # of the rows

_TONES = 4  # of each kind, for the stages of one worker: its fifth looks like its first


def draw_svg(timed: Sequence[Timed], *, title: str, seconds: bool = False) -> str:
    """Return a drawing of actions as an SVG image with a row for each worker.

    Args:
        timed: Actions with their times.
        title: Title of the image.
        seconds: Times are in seconds; in the unit of a plan's costs by default.
    """
    return "\n".join(_Image(_Sheet(timed, seconds=seconds), title).lines()) + "\n"


class _Image:
    """Image of a timetable, with a `title`."""

    def __init__(self, sheet: _Sheet, title: str) -> None:
        self._sheet = sheet
        self._title = title
        self._tones = min(_TONES, max(map(len, sheet.stages), default=1))
        labels = [(sheet.label(each), each.end - each.start) for row in sheet.rows for each in row]
        letters = max((len(label) for label, _ in labels), default=0)
        readable = (_SPACIOUS + _LETTER * letters) * sheet.span / sheet.shortest
        legend = sum(36 + 16 * self._tones + _LETTER * len(look.word) for look in sheet.looks.values())
        heading = 1.25 * _LETTER * len(title) + legend - _NAMES - _IDLE
        self._rows = max(_NARROWEST, min(_WIDEST, readable), heading)  # the width of the rows
        self._per_time = self._rows / sheet.span if sheet.span else 0.0
        self._width = 2 * _EDGE + _NAMES + self._rows + _IDLE
        self._height = self._top(len(sheet.rows)) + _TIMES
        # Unless nearly all labels fit, all are cut to their number: a mixture is hard to read.
        fitting = sum(time * self._per_time >= _least_width(label) for label, time in labels)
        self._room_for_labels = fitting >= 0.9 * len(labels)

    def lines(self) -> Iterator[str]:
        """Yield the lines of the image."""
        size = f'width="{self._width:.0f}" height="{self._height:.0f}"'
        yield (
            f'<svg xmlns="http://www.w3.org/2000/svg" {size} viewBox="0 0 {self._width:.0f} {self._height:.0f}" '
            f'role="img">'
        )
        yield f"<title>{escape(self._title)}</title>"
        yield f"<style>{STYLE}</style>"
        yield f'<rect class="page" {size} rx="10"/>'
        yield f'<text class="title" x="{_EDGE}" y="{_EDGE + 14}">{escape(self._title)}</text>'
        yield from self._legend()
        yield from self._lanes()
        yield from self._scale()
        for worker in range(len(self._sheet.rows)):
            yield from self._actions(worker)
        yield "</svg>"

    def _legend(self) -> Iterator[str]:
        x = self._width - _EDGE
        for kind, look in reversed(self._sheet.looks.items()):
            x -= _LETTER * len(look.word)
            yield f'<text class="word" x="{x:.1f}" y="{_EDGE + 14}">{look.word}</text>'
            x -= 4
            for tone in reversed(range(self._tones)):
                x -= 16
                tones = f"{tones_of(kind)} t{tone}"
                yield f'<rect class="{tones}" x="{x:.1f}" y="{_EDGE + 3}" width="14" height="14" rx="3"/>'
            x -= 16

    def _lanes(self) -> Iterator[str]:
        for worker in range(len(self._sheet.rows)):
            top, base = self._top(worker), self._top(worker) + _BAR / 2 + 4.5
            yield f'<text class="word" x="{_EDGE}" y="{base}">worker {worker}</text>'
            yield (
                f'<rect class="lane" x="{_EDGE + _NAMES}" y="{top}" width="{self._rows:.1f}" height="{_BAR}" rx="4"/>'
            )
            idle = f"{self._sheet.idle(worker):.0%} idle"
            yield f'<text class="share" x="{self._width - _EDGE:.1f}" y="{base}">{idle}</text>'

    def _scale(self) -> Iterator[str]:
        top, bottom = self._top(0) - 4, self._top(len(self._sheet.rows)) - (_ROW - _BAR) + 4
        for tick in self._sheet.ticks(most=12):
            x = self._x(self._sheet.start + tick)
            yield f'<path class="tick" d="M{x:.1f} {top}V{bottom}"/>'
            yield f'<text class="time" x="{x:.1f}" y="{bottom + 16}">{self._sheet.time(tick)}</text>'

    def _actions(self, worker: int) -> Iterator[str]:
        top = self._top(worker)
        for each in self._sheet.rows[worker]:
            x, width = self._x(each.start), (each.end - each.start) * self._per_time
            tone = self._sheet.stages[worker].index(each.action.stage) % _TONES
            yield (
                f"<g><title>{self._details(each)}</title>"
                f'<rect class="{tones_of(each.action.kind)} t{tone}" x="{x + 0.75:.2f}" y="{top}" '
                f'width="{max(width - 1.5, 0.5):.2f}" height="{_BAR}" rx="{min(4, width / 4):.1f}"/>'
                f"{self._label(each, x + width / 2, top, width)}</g>"
            )

    def _label(self, each: Timed, x: float, top: float, width: float) -> str:
        label = self._sheet.label(each) if self._room_for_labels else str(self._sheet.number(each))
        if width < _least_width(label):
            return ""
        return f'<text class="label" x="{x:.2f}" y="{top + _BAR / 2 + 4.5}">{label}</text>'

    def _details(self, each: Timed) -> str:
        start, end = (self._sheet.time(time - self._sheet.start) for time in (each.start, each.end))
        of = "" if each.action.kind in ONCE_PER_STEP else f" of microbatch {each.action.microbatch}"
        return (
            f"{each.action}: {LOOKS.get(each.action.kind, OTHER).word}{of} at stage {each.action.stage}, "
            f"step {each.step}&#10;worker {each.worker}, {start} to {end}"
        )

    def _top(self, worker: int) -> int:
        return _EDGE + _TITLE + worker * _ROW - 12

    def _x(self, time: float) -> float:
        return _EDGE + _NAMES + (time - self._sheet.start) * self._per_time


def tones_of(kind: str) -> str:
    """Return the kind in whose tones `kind` is drawn: `ADD`, and a feature's own kinds, in the tones of `SUBTOTAL`."""
    return kind if LOOKS.get(kind, OTHER).light else Kind.SUBTOTAL


def _least_width(label: str) -> float:
    """Return the least width in pixels of an action with this label."""
    return _LETTER * len(label) + 4


def _rules(theme: str, *, page: str, text: str, faint_text: str, lane: str, tick: str, label: str) -> str:
    """Return the CSS rules of a `theme`, "light" or "dark". Colours are in CSS notation."""
    tones = (
        f".{kind}.t{tone}{{fill:{colour}}}"
        for kind, look in LOOKS.items()
        for tone, colour in enumerate(getattr(look, theme))
    )
    return (
        f".page{{fill:{page}}}.lane{{fill:{lane}}}.tick{{stroke:{tick}}}"
        f".title,.word{{fill:{text}}}.time,.share{{fill:{faint_text}}}.label{{fill:{label}}}" + "".join(tones)
    )


_LIGHT = _rules(
    "light", page="#ffffff", text="#1f2328", faint_text="#656d76", lane="#f3f5f7", tick="#dde1e6", label="#14202e"
)
_DARK = _rules(
    "dark", page="#0d1117", text="#e6edf3", faint_text="#8d96a0", lane="#171c24", tick="#2a313b", label="#f7fafd"
)
STYLE = (
    'text{font:13px system-ui,"Segoe UI",Helvetica,Arial,sans-serif}'
    ".title{font-size:16px;font-weight:600}.time,.share,.label{font-size:12px;font-variant-numeric:tabular-nums}"
    ".time,.label{text-anchor:middle}.share{text-anchor:end}.label{pointer-events:none}"
    "g:hover>rect{stroke:currentColor;stroke-width:1.5}"
    f"{_LIGHT}@media(prefers-color-scheme:dark){{svg{{color:#e6edf3}}{_DARK}}}"
)
