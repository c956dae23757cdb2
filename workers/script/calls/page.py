"""Timetable of a script's run, measured or planned, and the page that a notebook shows of a line.

Losses that a script has seen are thinned out, so that they take bounded room in a long run.
"""

import base64
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from html import escape
from pkgutil import resolve_name
from typing import Any

from stageline.pipeline.evaluation import Score
from stageline.pipeline.program import Timed, check_schedule
from stageline.pipeline.schedule import Action, Kind, Schedule
from stageline.pipeline.tree import Tree

from .fit_progress import FitProgress, shown

MOST = 400  # points that are kept; two of them are about two pixels apart

Point = tuple[int, float]  # a step and its loss

# All in pixels.
_WIDTH, _HEIGHT = 640, 220
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 24, 36, 34  # free around the curve

_STYLE = (
    'text{font:12px system-ui,"Segoe UI",Helvetica,Arial,sans-serif;fill:#656d76}.title{font-size:14px;font-weight:600}'
    ".page{fill:#ffffff}.title{fill:#1f2328}.tick{stroke:#dde1e6}.curve{stroke:#1f6fc4}.newest{fill:#1f6fc4}"
    ".curve{fill:none;stroke-width:1.5;stroke-linejoin:round}"
    "@media(prefers-color-scheme:dark){text{fill:#8d96a0}.page{fill:#0d1117}.title{fill:#e6edf3}.tick{stroke:#2a313b}"
    ".curve{stroke:#6facee}.newest{fill:#6facee}}"
)
DRAWING = "stageline.workers.extras.drawing"  # imported by name: a script that draws nothing does without it
WIDTH = 120  # columns of the text


class LossCurve:
    """Losses of every `stride`-th step, and the newest; `stride` doubles whenever more than `MOST` are kept."""

    def __init__(self) -> None:
        """Begin without losses."""
        self.stride = 1
        self.newest: Point | None = None
        self._kept: list[Point] = []

    def add(self, step: int, loss: float) -> None:
        """Add the loss of `step`; steps must come in order. A loss that is not finite is not drawn."""
        self.newest = step, loss
        if step % self.stride or not math.isfinite(loss):
            return
        self._kept.append((step, loss))
        if len(self._kept) > MOST:
            self.stride *= 2
            self._kept = [point for point in self._kept if point[0] % self.stride == 0]

    @property
    def points(self) -> list[Point]:
        """Kept points, and the newest one if it is finite."""
        newest, kept = self.newest, list(self._kept)
        beyond = newest is not None and math.isfinite(newest[1]) and (not kept or newest[0] > kept[-1][0])
        return [*kept, newest] if beyond and newest is not None else kept


def draw_losses(points: Sequence[Point]) -> str:
    """Return a standalone SVG image of at least one point, in the reader's light or dark theme."""
    return "\n".join(_picture(points)) + "\n"


def _picture(points: Sequence[Point]) -> Iterator[str]:
    steps, losses = [step for step, _ in points], [loss for _, loss in points]
    marked = _ticks(min(losses), max(losses), most=5)
    first, last = min(steps), max(max(steps), min(steps) + 1)
    low, high = min(marked[0], min(losses)), max(marked[-1], max(losses))

    def x(step: float) -> float:
        return _LEFT + (step - first) / (last - first) * (_WIDTH - _LEFT - _RIGHT)

    def y(loss: float) -> float:
        return _HEIGHT - _BOTTOM - (loss - low) / (high - low) * (_HEIGHT - _TOP - _BOTTOM)

    size = f'width="{_WIDTH}" height="{_HEIGHT}"'
    yield f'<svg xmlns="http://www.w3.org/2000/svg" {size} viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img">'
    yield f'<title>loss by step</title><style>{_STYLE}</style><rect class="page" {size} rx="10"/>'
    yield f'<text class="title" x="{_LEFT}" y="22">loss by step</text>'
    for loss in marked:
        yield f'<path class="tick" d="M{_LEFT} {y(loss):.1f}H{_WIDTH - _RIGHT}"/>'
        yield f'<text text-anchor="end" x="{_LEFT - 8}" y="{y(loss) + 4:.1f}">{loss:.4g}</text>'
    for step in _ticks(min(steps), max(steps), most=8, whole=True):
        yield f'<text text-anchor="middle" x="{x(step):.1f}" y="{_HEIGHT - 12}">{step:.0f}</text>'
    curve = " ".join(f"{x(step):.1f},{y(loss):.1f}" for step, loss in points)
    yield f'<polyline class="curve" points="{curve}"/>'
    step, loss = points[-1]
    yield f'<circle class="newest" cx="{x(step):.1f}" cy="{y(loss):.1f}" r="3"/>'
    yield f'<text text-anchor="end" x="{_WIDTH - _RIGHT}" y="22">step {step}: {loss:.4g}</text></svg>'


def _ticks(low: float, high: float, *, most: int, whole: bool = False) -> list[float]:
    """Return at least two round numbers, 1, 2 or 5 times a power of ten apart, the first at most `low`."""
    span = high - low or abs(high) or 1.0
    apart = 10.0 ** math.floor(math.log10(span / most))
    apart *= next(factor for factor in (1, 2, 5, 10, 20) if span / (apart * factor) <= most)
    apart = max(apart, 1.0) if whole else apart
    first = math.ceil(low / apart) if whole else math.floor(low / apart)
    last = math.floor(high / apart) if whole else math.ceil(high / apart)
    return [apart * tick for tick in range(first, max(last, first + 1 - whole) + 1)]


class Seen:
    """Losses and evaluations that the script has seen: `steps` counts from the run's beginning, `loss` is the newest.

    The thread that takes the replies writes once for each step, and a fit for each evaluation; any thread may read.
    """

    def __init__(self, start: int) -> None:
        """Begin at step `start`."""
        self.start = self.steps = start
        self.loss: float | None = None
        self.fit: FitProgress | None = None  # of the newest fit
        self._newest: Score | None = None  # evaluation of a fit
        self.curve = LossCurve()

    def begin_fit(self, end: int | None, epoch: int | None, metric: str) -> None:
        """Note the beginning of a fit, whose `FitProgress` has these values."""
        self.fit = FitProgress(end, epoch, metric)

    def evaluated(self, newest: Score, best: Score | None) -> None:
        """Note an evaluation of the fit, and the best one so far."""
        self._newest = newest
        if self.fit is not None:
            self.fit = self.fit.evaluated(newest, best)

    def value_at(self, step: int) -> float | None:
        """Return the value that a fit has found after `step` steps; None if its newest evaluation is another."""
        return self._newest.value if self._newest is not None and self._newest.step == step else None

    def step_ended(self, done: "Future[Mapping[int, Tree]]") -> None:
        """Note the loss of a step whose replies have come; a failed step is not counted."""
        if done.cancelled() or done.exception() is not None:
            return
        replies = (reply[0] if isinstance(reply, tuple) else reply for reply in done.result().values())
        loss = next((reply for reply in replies if isinstance(reply, float)), None)
        if loss is not None:
            self.loss = loss
            self.curve.add(self.steps, loss)
        self.steps += 1


@dataclass(frozen=True, slots=True)
class Timetable:
    """Begin and end of each action of one training step.

    `str()` draws it in `WIDTH` columns, `svg` is an image.

    Attributes:
        title: Heading of the drawing.
        timed: Actions with their times: seconds since the epoch if measured. If planned, a forward takes 1, a backward
            2.
        measured: True if the step has run.

    Example:
        print(line.timetable())
        Path("step.svg").write_text(line.timetable().svg)
    """

    title: str
    timed: tuple[Timed, ...]
    measured: bool

    @property
    def svg(self) -> str:
        """Drawing as a standalone SVG image."""
        image: str = resolve_name(f"{DRAWING}:draw_svg")(self.timed, title=self.title, seconds=self.measured)
        return image

    def __str__(self) -> str:
        """Return the drawing as text, in ASCII if stdout does not take UTF-8."""
        encoding = getattr(sys.stdout, "encoding", "") or ""
        ascii_only = encoding.lower().replace("-", "") != "utf8"
        draw = resolve_name(f"{DRAWING}:draw_text")
        drawn = draw(self.timed, width=WIDTH, ascii_only=ascii_only, seconds=self.measured)
        return f"{self.title}:\n{drawn}"

    def __repr__(self) -> str:
        """Return the drawing as text."""
        return str(self)

    def _repr_html_(self) -> str:
        return as_image(self.svg, self.title)


def planned(schedule: Schedule) -> Timetable:
    """Return the timetable of one step as `schedule` plans it."""
    return Timetable(f"{schedule.name} as it is planned", check_schedule(schedule).timed, measured=False)


def timetable_of(schedule: Schedule, timed: Sequence[Timed]) -> Timetable:
    """Return the timetable of the step whose actions are `timed`; without any, the planned one."""
    if not timed:
        return planned(schedule)
    return Timetable(f"{schedule.name} as it ran, step {timed[0].step}", tuple(timed), measured=True)


def timed_in(schedule: Schedule, facts: Mapping[str, Any]) -> list[Timed]:
    """Return the actions in `facts`, the broker's answer timetable/1."""
    return [
        Timed(
            schedule.owner(each["stage"]),
            Action(Kind(each["kind"]), each["stage"], each["microbatch"]),
            each["start"],
            each["end"],
            facts["step"],
        )
        for each in facts["actions"]
    ]


def as_image(svg: str, about: str) -> str:
    """Return an SVG image as an HTML element that shares no style with its page.

    A notebook has many drawings on one page.
    """
    data = base64.b64encode(svg.encode()).decode()
    return f'<img alt="{escape(about)}" style="max-width:100%" src="data:image/svg+xml;base64,{data}">'


@dataclass(frozen=True, slots=True)
class Panels:
    """Panels about a line, as HTML that a notebook shows."""

    html: str

    def _repr_html_(self) -> str:
        return self.html


def framed(document: str, about: str) -> str:
    """Return an HTML document as an element of a page, with which it shares neither style nor scripts."""
    style = "width:100%;height:900px;border:0"
    return (
        f'<iframe title="{escape(about)}" sandbox="allow-scripts" style="{style}" srcdoc="{escape(document)}"></iframe>'
    )


def page(name: str, state: str, seen: Seen, workers: Sequence[str], timetable: Timetable) -> str:
    """Return HTML about a line; its images share no style with the page that it is put into.

    Args:
        name: Name of the run.
        state: State or position of the line, as text.
        seen: Losses that the script has seen.
        workers: One line for each worker.
        timetable: Timetable of a step.
    """
    loss = "" if seen.loss is None else f", loss {seen.loss:.4g}"
    lines = [
        f"<b>{escape(name)}</b>: {escape(state)}, steps that have ended: {seen.steps}{loss}",
        *([] if seen.fit is None else [shown("fit", seen.steps, None, seen.fit).html]),
        *map(escape, workers),
    ]
    points = seen.curve.points
    images = [as_image(draw_losses(points), "loss by step")] if points else []
    return "<br>".join([*lines, *images, timetable._repr_html_()])
