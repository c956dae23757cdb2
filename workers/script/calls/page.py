"""The timetable of a script's run, as it ran or as it is planned, and the page that a notebook shows of a line."""

import base64
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from stageline.pipeline.program import Timed, check_schedule
from stageline.pipeline.schedule import Action, Kind, Schedule
from stageline.workers.extras.drawing import draw_svg, draw_text

from .seen import Seen, draw_losses

WIDTH = 120  # columns of the text


@dataclass(frozen=True, slots=True)
class Timetable:
    """When each action of one training step began and ended.

    `measured`: `timed` are the times of a step that has run, in seconds since the epoch; if not, those of the plan,
    where a forward takes 1, a backward 2. `str()` is a drawing of `WIDTH` columns, `svg` an image.
    """

    title: str
    timed: tuple[Timed, ...]
    measured: bool

    @property
    def svg(self) -> str:
        """The drawing as a standalone SVG image."""
        return draw_svg(self.timed, title=self.title, seconds=self.measured)

    def __str__(self) -> str:
        drawn = draw_text(self.timed, width=WIDTH, ascii_only=not _shows_blocks(), seconds=self.measured)
        return f"{self.title}:\n{drawn}"

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        return as_image(self.svg, self.title)


def planned(schedule: Schedule) -> Timetable:
    """The plan of one step."""
    return Timetable(f"{schedule.name} as it is planned", check_schedule(schedule).timed, measured=False)


def timetable_of(schedule: Schedule, timed: Sequence[Timed]) -> Timetable:
    """As the step ran of which `timed` are all actions; as it is planned if there are none."""
    if not timed:
        return planned(schedule)
    return Timetable(f"{schedule.name} as it ran, step {timed[0].step}", tuple(timed), measured=True)


def timed_in(schedule: Schedule, facts: Mapping[str, Any]) -> list[Timed]:
    """The actions in the broker's answer timetable/1."""
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
    """An SVG image as HTML whose page it shares no style with: a notebook has many drawings on one page."""
    data = base64.b64encode(svg.encode()).decode()
    return f'<img alt="{escape(about)}" style="max-width:100%" src="data:image/svg+xml;base64,{data}">'


def _shows_blocks() -> bool:
    return (getattr(sys.stdout, "encoding", "") or "").lower().replace("-", "") == "utf8"


def page(name: str, state: str, seen: Seen, workers: Sequence[str], timetable: Timetable) -> str:
    """HTML whose images share no style with the page that it is put into."""
    loss = "" if seen.loss is None else f", loss {seen.loss:.4g}"
    lines = [
        f"<b>{escape(name)}</b>: {escape(state)}, steps that have ended: {seen.steps}{loss}",
        *map(escape, workers),
    ]
    points = seen.curve.points
    images = [as_image(draw_losses(points), "loss by step")] if points else []
    return "<br>".join([*lines, *images, timetable._repr_html_()])
