"""A timetable as a standalone SVG image, in the reader's light or dark theme. Hovering an action shows its details."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from html import escape

from stageline.pipeline.schedule import Kind
from stageline.pipeline.schedule.check import Timed

from .sheet import WORDS, Sheet
from .theme import STYLE, TONES

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
    return "\n".join(_Drawing(Sheet(timed, seconds), title).lines()) + "\n"


@dataclass(frozen=True)
class _Drawing:
    sheet: Sheet
    title: str

    def lines(self) -> Iterator[str]:
        size = f'width="{self._width:.0f}" height="{self._height:.0f}"'
        yield (
            f'<svg xmlns="http://www.w3.org/2000/svg" {size} viewBox="0 0 {self._width:.0f} {self._height:.0f}" '
            f'role="img">'
        )
        yield f"<title>{escape(self.title)}</title>"
        yield f"<style>{STYLE}</style>"
        yield f'<rect class="page" {size} rx="10"/>'
        yield f'<text class="title" x="{_EDGE}" y="{_EDGE + 14}">{escape(self.title)}</text>'
        yield from self._legend()
        yield from self._lanes()
        yield from self._scale()
        for worker in range(len(self.sheet.rows)):
            yield from self._actions(worker)
        yield "</svg>"

    def _legend(self) -> Iterator[str]:
        x = self._width - _EDGE
        for kind in reversed(self.sheet.kinds):
            x -= _LETTER * len(WORDS[kind])
            yield f'<text class="word" x="{x:.1f}" y="{_EDGE + 14}">{WORDS[kind]}</text>'
            x -= 4
            for tone in reversed(range(self._tones)):
                x -= 16
                yield f'<rect class="{kind} t{tone}" x="{x:.1f}" y="{_EDGE + 3}" width="14" height="14" rx="3"/>'
            x -= 16

    def _lanes(self) -> Iterator[str]:
        for worker in range(len(self.sheet.rows)):
            top, base = self._top(worker), self._top(worker) + _BAR / 2 + 4.5
            yield f'<text class="word" x="{_EDGE}" y="{base}">worker {worker}</text>'
            yield (
                f'<rect class="lane" x="{_EDGE + _NAMES}" y="{top}" width="{self._rows:.1f}" height="{_BAR}" rx="4"/>'
            )
            idle = f"{self.sheet.idle(worker):.0%} idle"
            yield f'<text class="share" x="{self._width - _EDGE:.1f}" y="{base}">{idle}</text>'

    def _scale(self) -> Iterator[str]:
        top, bottom = self._top(0) - 4, self._top(len(self.sheet.rows)) - (_ROW - _BAR) + 4
        for tick in self.sheet.ticks(most=12):
            x = self._x(self.sheet.start + tick)
            yield f'<path class="tick" d="M{x:.1f} {top}V{bottom}"/>'
            yield f'<text class="time" x="{x:.1f}" y="{bottom + 16}">{self.sheet.time(tick)}</text>'

    def _actions(self, worker: int) -> Iterator[str]:
        top = self._top(worker)
        for each in self.sheet.rows[worker]:
            x, width = self._x(each.start), (each.end - each.start) * self._per_time
            tone = self.sheet.stages[worker].index(each.action.stage) % TONES
            yield (
                f"<g><title>{self._details(each)}</title>"
                f'<rect class="{each.action.kind} t{tone}" x="{x + 0.75:.2f}" y="{top}" '
                f'width="{max(width - 1.5, 0.5):.2f}" height="{_BAR}" rx="{min(4, width / 4):.1f}"/>'
                f"{self._label(each, x + width / 2, top, width)}</g>"
            )

    def _label(self, each: Timed, x: float, top: float, width: float) -> str:
        label = self.sheet.label(each) if self._room_for_labels else str(self.sheet.number(each))
        if width < _least_width(label):
            return ""
        return f'<text class="label" x="{x:.2f}" y="{top + _BAR / 2 + 4.5}">{label}</text>'

    def _details(self, each: Timed) -> str:
        start, end = (self.sheet.time(time - self.sheet.start) for time in (each.start, each.end))
        of = "" if each.action.kind is Kind.UPDATE else f" of microbatch {each.action.microbatch}"
        return (
            f"{each.action}: {WORDS[each.action.kind]}{of} at stage {each.action.stage}, step {each.step}&#10;"
            f"worker {each.worker}, {start} to {end}"
        )

    @cached_property
    def _rows(self) -> float:
        """The width of the rows."""
        letters = max((len(self.sheet.label(each)) for row in self.sheet.rows for each in row), default=0)
        readable = (_SPACIOUS + _LETTER * letters) * self.sheet.span / self.sheet.shortest
        legend = sum(36 + 16 * self._tones + _LETTER * len(WORDS[kind]) for kind in self.sheet.kinds)
        heading = 1.25 * _LETTER * len(self.title) + legend - _NAMES - _IDLE
        return max(_NARROWEST, min(_WIDEST, readable), heading)

    @cached_property
    def _room_for_labels(self) -> bool:
        """Whether nearly all labels fit; otherwise all are cut to their number: a mixture is hard to read."""
        fits = [
            (each.end - each.start) * self._per_time >= _least_width(self.sheet.label(each))
            for row in self.sheet.rows
            for each in row
        ]
        return sum(fits) >= 0.9 * len(fits)

    @property
    def _tones(self) -> int:
        return min(TONES, max(map(len, self.sheet.stages), default=1))

    @property
    def _per_time(self) -> float:
        return self._rows / self.sheet.span if self.sheet.span else 0.0

    @property
    def _width(self) -> float:
        return 2 * _EDGE + _NAMES + self._rows + _IDLE

    @property
    def _height(self) -> float:
        return self._top(len(self.sheet.rows)) + _TIMES

    def _top(self, worker: int) -> int:
        return _EDGE + _TITLE + worker * _ROW - 12

    def _x(self, time: float) -> float:
        return _EDGE + _NAMES + (time - self.sheet.start) * self._per_time


def _least_width(label: str) -> float:
    """The least width of an action with this label, in pixels."""
    return _LETTER * len(label) + 4
