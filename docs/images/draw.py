"""Draws the pictures of docs/reference/schedules.md.

Run it as `python docs/images/draw.py`; a test keeps the pictures up to date.
"""

from pathlib import Path

from stageline.pipeline.program import Costs, check_schedule
from stageline.pipeline.schedule import Schedule, make_schedule, v_shaped, window_for
from stageline.workers.extras.drawing import draw_svg

FOUR = ((0,), (1,), (2,), (3,))
AWAY = 2.0  # a one-way latency, in forwards


def pictures() -> dict[str, str]:
    """The images by file name."""
    window = window_for([AWAY] * 3, forward=1, backward=2)
    return {
        "gpipe.svg": _drawn("GPipe: 4 workers, 8 microbatches", make_schedule("gpipe", FOUR, 8)),
        "1f1b.svg": _drawn("1F1B: 4 workers, 8 microbatches", make_schedule("1f1b", FOUR, 8)),
        "1f1b-few.svg": _drawn("1F1B: 4 workers, 2 microbatches", make_schedule("1f1b", FOUR, 2)),
        "latency-1f1b.svg": _drawn("1F1B, every message 2 units on its way", make_schedule("1f1b", FOUR, 8), AWAY),
        "latency-window.svg": _drawn(
            f"Window {', '.join(map(str, window))}, every message 2 units on its way",
            make_schedule("window", FOUR, 8, window=window),
            AWAY,
        ),
        "interleaved-1f1b.svg": _drawn(
            "Interleaved 1F1B: 2 stages on each of 4 workers, 8 microbatches",
            make_schedule("interleaved-1f1b", ((0, 4), (1, 5), (2, 6), (3, 7)), 8),
            halved=True,
        ),
        "looped-bfs.svg": _drawn(
            "Looped breadth-first: 2 stages on each of 4 workers, 8 microbatches",
            make_schedule("looped-bfs", ((0, 4), (1, 5), (2, 6), (3, 7)), 8),
            halved=True,
        ),
        "zb-h1.svg": _drawn("ZB-H1: 4 workers, 8 microbatches", make_schedule("zb-h1", FOUR, 8)),
        "zb-v.svg": _drawn(
            "ZB-V: 2 stages on each of 4 workers, 8 microbatches", make_schedule("zb-v", v_shaped(4), 8), halved=True
        ),
        "dualpipe-v.svg": _drawn(
            "DualPipeV: 2 stages on each of 4 workers, 8 microbatches",
            make_schedule("dualpipe-v", v_shaped(4), 8),
            halved=True,
        ),
        "asynchronous.svg": _drawn(
            "Asynchronous 1F1B: an update after each backward",
            make_schedule("1f1b", FOUR[:3], 1, mode="async"),
            steps=8,
            update=0.75,
        ),
        "two-versions.svg": _drawn(
            "2BW: an update for three microbatches, no flush",
            make_schedule("2bw", FOUR[:3], 3, mode="async"),
            steps=3,
            update=0.75,
        ),
        "u-shape.svg": _drawn(
            "1F1B: first and last stage on worker 0, 6 microbatches", make_schedule("1f1b", ((0, 3), (1,), (2,)), 6)
        ),
        "frozen.svg": _drawn("1F1B: stages 0 and 1 do not train", make_schedule("1f1b", FOUR, 8, first_trainable=2)),
    }


def _drawn(
    title: str,
    schedule: Schedule,
    latency: float = 0,
    update: float = 0,
    halved: bool = False,
    steps: int | None = None,
) -> str:
    """A picture in which a whole worker's forward takes 1 and its backward 2."""
    share = 2 if halved else 1
    costs = Costs.even(schedule.stages, forward=1 / share, backward=2 / share, update=update, latency=latency)
    return draw_svg(check_schedule(schedule, costs, steps=steps).timed, title=title)


if __name__ == "__main__":
    for name, picture in pictures().items():
        (Path(__file__).parent / name).write_text(picture, encoding="utf-8")
