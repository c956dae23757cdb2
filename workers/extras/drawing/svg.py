"""A timetable as a standalone SVG image, in the reader's light or dark theme. Hovering an action shows its details."""

from collections.abc import Iterator, Mapping, Sequence
from html import escape

from stageline.pipeline.program import Timed
from stageline.pipeline.schedule import ONCE_PER_STEP, Kind

from .sheet import OTHER, WORDS, Sheet

# All in pixels.
_EDGE = 24  # free around everything
_NAMES, _IDLE = 78, 70  # left and right of the rows
_TITLE = 52  # above the rows
_ROW, _BAR = 38, 30  # from row to row, and how much of it an action takes
_TIMES = 26  # below the rows
_SPACIOUS = 12  # what the shortest action gets beside its label, where rows have the room
_LETTER = 7.5
_NARROWEST, _WIDEST = 420, 880  # of the rows


def draw_svg(timed: Sequence[Timed], *, title: str, seconds: bool = False) -> str:
    """The actions as an image with a row for each worker. Times are in seconds or in the unit of a plan's costs."""
    return "\n".join(_Drawing(Sheet(timed, seconds=seconds), title).lines()) + "\n"


class _Drawing:
    def __init__(self, sheet: Sheet, title: str) -> None:
        self._sheet = sheet
        self._title = title
        self._tones = min(_TONES, max(map(len, sheet.stages), default=1))
        labels = [(sheet.label(each), each.end - each.start) for row in sheet.rows for each in row]
        letters = max((len(label) for label, _ in labels), default=0)
        readable = (_SPACIOUS + _LETTER * letters) * sheet.span / sheet.shortest
        legend = sum(36 + 16 * self._tones + _LETTER * len(WORDS.get(kind, OTHER)) for kind in sheet.kinds)
        heading = 1.25 * _LETTER * len(title) + legend - _NAMES - _IDLE
        self._rows = max(_NARROWEST, min(_WIDEST, readable), heading)  # the width of the rows
        self._per_time = self._rows / sheet.span if sheet.span else 0.0
        self._width = 2 * _EDGE + _NAMES + self._rows + _IDLE
        self._height = self._top(len(sheet.rows)) + _TIMES
        # Unless nearly all labels fit, all are cut to their number: a mixture is hard to read.
        fitting = sum(time * self._per_time >= _least_width(label) for label, time in labels)
        self._room_for_labels = fitting >= 0.9 * len(labels)

    def lines(self) -> Iterator[str]:
        size = f'width="{self._width:.0f}" height="{self._height:.0f}"'
        yield (
            f'<svg xmlns="http://www.w3.org/2000/svg" {size} viewBox="0 0 {self._width:.0f} {self._height:.0f}" '
            f'role="img">'
        )
        yield f"<title>{escape(self._title)}</title>"
        yield f"<style>{_STYLE}</style>"
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
        for kind in reversed(self._sheet.kinds):
            x -= _LETTER * len(WORDS.get(kind, OTHER))
            yield f'<text class="word" x="{x:.1f}" y="{_EDGE + 14}">{WORDS.get(kind, OTHER)}</text>'
            x -= 4
            for tone in reversed(range(self._tones)):
                x -= 16
                tones = f"{_tones_of(kind)} t{tone}"
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
                f'<rect class="{_tones_of(each.action.kind)} t{tone}" x="{x + 0.75:.2f}" y="{top}" '
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
        word = WORDS.get(each.action.kind, OTHER)
        of = "" if each.action.kind in ONCE_PER_STEP else f" of microbatch {each.action.microbatch}"
        return (
            f"{each.action}: {word}{of} at stage {each.action.stage}, step {each.step}&#10;"
            f"worker {each.worker}, {start} to {end}"
        )

    def _top(self, worker: int) -> int:
        return _EDGE + _TITLE + worker * _ROW - 12

    def _x(self, time: float) -> float:
        return _EDGE + _NAMES + (time - self._sheet.start) * self._per_time


def _tones_of(kind: str) -> str:
    """The kind whose tones it has: one that adds up gradients, those of the other that does."""
    return Kind.SUBTOTAL if kind == Kind.ADD or kind not in WORDS else kind


def _least_width(label: str) -> float:
    """The least width of an action with this label, in pixels."""
    return _LETTER * len(label) + 4


_TONES = 4  # of each kind, for the stages of one worker: its fifth looks like its first


def _rules(
    *, page: str, text: str, faint_text: str, lane: str, tick: str, label: str, actions: Mapping[Kind, Sequence[str]]
) -> str:
    """The CSS rules of a theme, of colours in CSS notation; `actions` has `_TONES` for each kind."""
    tones = (
        f".{kind}.t{tone}{{fill:{colour}}}" for kind, colours in actions.items() for tone, colour in enumerate(colours)
    )
    return (
        f".page{{fill:{page}}}.lane{{fill:{lane}}}.tick{{stroke:{tick}}}"
        f".title,.word{{fill:{text}}}.time,.share{{fill:{faint_text}}}.label{{fill:{label}}}" + "".join(tones)
    )


# A hue for each kind of action. Blue and orange can be told apart without seeing red or green.
_LIGHT = _rules(
    page="#ffffff",
    text="#1f2328",
    faint_text="#656d76",
    lane="#f3f5f7",
    tick="#dde1e6",
    label="#14202e",
    actions={
        Kind.FORWARD: ("#9cc7f7", "#cde2fb", "#6facee", "#e3effd"),
        Kind.BACKWARD: ("#f8b76f", "#fcd9b0", "#ee9a45", "#fdeada"),
        Kind.INPUT: ("#f49b8f", "#f9c8c1", "#e97767", "#fce3df"),
        Kind.WEIGHT: ("#c7b3f0", "#e0d5f8", "#a98de4", "#eee8fb"),
        Kind.TIED: ("#8fd0c4", "#c6e8e1", "#5fb8a8", "#e0f3ef"),
        Kind.SUBTOTAL: ("#8fd0c4", "#c6e8e1", "#5fb8a8", "#e0f3ef"),
        Kind.NORMS: ("#d6c98a", "#ebe3bd", "#c2b25f", "#f5f0da"),
        Kind.CLIP: ("#d6c98a", "#ebe3bd", "#c2b25f", "#f5f0da"),
        Kind.UPDATE: ("#aab4be", "#ccd3da", "#8b97a3", "#e1e5e9"),
    },
)

_DARK = _rules(
    page="#0d1117",
    text="#e6edf3",
    faint_text="#8d96a0",
    lane="#171c24",
    tick="#2a313b",
    label="#f7fafd",
    actions={
        Kind.FORWARD: ("#2f6db5", "#1f4a80", "#4787d3", "#183862"),
        Kind.BACKWARD: ("#b4611c", "#824411", "#cf7a30", "#65340c"),
        Kind.INPUT: ("#b0433a", "#7d2d26", "#c95c52", "#60211c"),
        Kind.WEIGHT: ("#6f51b5", "#4d3785", "#896dcb", "#3a2966"),
        Kind.TIED: ("#2b7a6d", "#1d544b", "#3f988a", "#163f38"),
        Kind.SUBTOTAL: ("#2b7a6d", "#1d544b", "#3f988a", "#163f38"),
        Kind.NORMS: ("#857428", "#5c501b", "#a08d3a", "#463d14"),
        Kind.CLIP: ("#857428", "#5c501b", "#a08d3a", "#463d14"),
        Kind.UPDATE: ("#5b6570", "#3f474f", "#737e89", "#30363d"),
    },
)

_STYLE = (
    'text{font:13px system-ui,"Segoe UI",Helvetica,Arial,sans-serif}'
    ".title{font-size:16px;font-weight:600}.time,.share,.label{font-size:12px;font-variant-numeric:tabular-nums}"
    ".time,.label{text-anchor:middle}.share{text-anchor:end}.label{pointer-events:none}"
    "g:hover>rect{stroke:currentColor;stroke-width:1.5}"
    f"{_LIGHT}@media(prefers-color-scheme:dark){{svg{{color:#e6edf3}}{_DARK}}}"
)
