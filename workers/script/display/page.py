"""A line as a notebook shows it: where it is, its workers, its losses, and a step as it ran."""

from collections.abc import Sequence
from html import escape

from .loss_curve import draw_losses
from .seen import Seen
from .timetable import Timetable, as_image


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
