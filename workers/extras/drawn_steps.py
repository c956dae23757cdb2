"""Drawings of a step as it was planned over the same step as it was measured, and what each worker waited for.

          0 ms            100 ms           200 ms
worker 0  F0░ F1░    B0████ B1████                      planned
          F0░ F1░  ~~~~B0████  B1████u                  measured

Both rows of a worker have one scale. A stretch without an action is blank while another stage computes what is waited
for; otherwise it has the sign of its cause.
"""

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from textwrap import wrap
from typing import Any

from stageline.pipeline.schedule import ONCE_PER_STEP

from .drawing import LOOKS, OTHER, STYLE, tones_of

Facts = Mapping[str, Any]  # an action or a stretch without one, as the answer `timetable` has it

CAUSES = {  # of a stretch without an action: its sign, and what it says
    "schedule": (" ", "another stage computes it"),
    "wire": ("~", "messages on their way"),
    "data": ("d", "data"),
    "disk": ("s", "disk"),
    "offload": ("f", "activations in files"),
    "script": ("$", "the script"),
    "evaluation": ("e", "evaluation"),
    "switching": ("o", "the order of the schedule"),
    "paused": ("p", "the end of a pause"),
    "credit": ("c", "credit"),
    "room": ("r", "room in a queue"),
    "loop": (".", "between actions"),
}
WIDTH = 80  # columns, where the terminal does not say
_MARGIN = 21  # columns left of the rows


@dataclass(frozen=True, slots=True)
class DrawnStep:
    """A step to draw: its number, the name of its schedule, its actions planned and measured, and its idle stretches.

    Times are in seconds from the start of the step.
    """

    step: int
    schedule: str
    workers: tuple[int, ...]
    planned: Mapping[int, Sequence[Facts]]
    measured: Mapping[int, Sequence[Facts]]
    idle: Mapping[int, Sequence[Facts]]

    @classmethod
    def of(cls, facts: Facts) -> "DrawnStep":
        """Return the step of an entry of `steps` in the answer `timetable`."""
        begin = facts["start"]
        measured = _by_worker(facts["actions"], begin)
        workers = tuple(sorted(measured))
        return cls(
            facts["step"], facts["schedule"], workers, _by_worker(facts["planned"], 0.0), measured,
            _by_worker(facts["idle"], begin),
        )  # fmt: skip

    @property
    def seconds(self) -> float:
        """Time from the first start to the last end, as it was measured."""
        return _last_end(self.measured)

    @property
    def planned_seconds(self) -> float:
        """Time from the first start to the last end, as it was planned."""
        return _last_end(self.planned)

    def waits(self, worker: int) -> dict[tuple[str, int | None], float]:
        """Return the seconds that a worker waited within the step, by cause and stage, the longest first."""
        found: dict[tuple[str, int | None], float] = defaultdict(float)
        end = self.seconds
        for each in self.idle.get(worker, ()):
            found[each["cause"], each["stage"]] += max(0.0, min(each["end"], end) - max(0.0, each["start"]))
        return dict(sorted(found.items(), key=lambda one: -one[1]))

    def waits_before(self) -> dict[str, float]:
        """Return the longest that a worker paused before the step, by cause, in seconds."""
        found: dict[str, float] = {}
        for each in (one for row in self.idle.values() for one in row if one["stage"] is None):
            if (seconds := min(0.0, each["end"]) - each["start"]) > 0 and each["cause"] != "loop":
                found[each["cause"]] = max(found.get(each["cause"], 0.0), seconds)
        return found


def _by_worker(timed: Sequence[Facts], begin: float) -> dict[int, list[Facts]]:
    found: dict[int, list[Facts]] = defaultdict(list)
    for each in sorted(timed, key=lambda one: float(one["start"])):
        found[each["worker"]].append({**each, "start": each["start"] - begin, "end": each["end"] - begin})
    return found


def _last_end(rows: Mapping[int, Sequence[Facts]]) -> float:
    return max((each["end"] for row in rows.values() for each in row), default=0.0)


def _time(seconds: float, span: float) -> str:
    for unit, factor in (("s", 1.0), ("ms", 1e3)):
        if span * factor >= 1:
            return f"{seconds * factor:.4g} {unit}"
    return f"{seconds * 1e6:.4g} µs"


def _label(each: Facts, *, with_stage: bool) -> str:
    number = "" if each["kind"] in ONCE_PER_STEP else str(each["microbatch"])
    return f"{each['stage'] if with_stage else ''}{each['kind']}{number}"


def _several_stages(step: DrawnStep) -> bool:
    return any(len({each["stage"] for each in row}) > 1 for row in step.measured.values())


def draw_text(step: DrawnStep, *, width: int = WIDTH, ascii_only: bool = False) -> str:
    """Return a drawing of the step as lines of at most `width` columns, with what each worker waited for."""
    span = max(step.seconds, step.planned_seconds)
    columns = max(10, width - _MARGIN)
    if not span:
        return f"step {step.step}: no action took any time"
    lines = [_title(step), " " * _MARGIN + _axis(span, columns)]
    for worker in step.workers:
        planned = _row(step.planned.get(worker, ()), (), span, columns, step, ascii_only=ascii_only)
        measured = _row(step.measured[worker], step.idle.get(worker, ()), span, columns, step, ascii_only=ascii_only)
        lines += [f"{f'worker {worker}':10} planned   {planned}", f"{'':10} measured  {measured}"]
    return "\n".join(
        [*(line.rstrip() for line in [*lines, *_legend(step, width, ascii_only=ascii_only)]), *_told(step, width)]
    )


def _title(step: DrawnStep) -> str:
    span = step.seconds
    return (
        f"step {step.step} by {step.schedule}: {_time(span, span)}; {_time(step.planned_seconds, span)} with the same "
        "times of actions and nothing else to wait for"
    )


def _axis(span: float, columns: int) -> str:
    apart = 10.0 ** math.floor(math.log10(span / 4))
    apart *= next(factor for factor in (1, 2, 5, 10, 20) if span / (apart * factor) <= 5)
    line = ""
    for tick in range(math.floor(span / apart) + 1):
        column, time = round(tick * apart / span * columns), _time(tick * apart, span)
        if column + len(time) <= columns and (not line or column > len(line)):
            line = line.ljust(column) + time
    return line


def _row(
    actions: Sequence[Facts], idle: Sequence[Facts], span: float, columns: int, step: DrawnStep, *, ascii_only: bool
) -> str:
    cells = [" "] * columns

    def at(time: float) -> int:
        return min(columns, max(0, round(time / span * columns)))

    for each in idle:
        sign = CAUSES.get(each["cause"], CAUSES["loop"])[0]
        cells[at(each["start"]) : at(each["end"])] = sign * (at(each["end"]) - at(each["start"]))
    for each in actions:
        look, begin, end = LOOKS.get(each["kind"], OTHER), at(each["start"]), at(each["end"])
        fill = look.ascii if ascii_only else look.blocks
        label = _label(each, with_stage=_several_stages(step))
        shown = label.ljust(end - begin, fill) if end - begin > len(label) else fill * (end - begin)
        cells[begin:end] = shown
    for each in idle:  # that lies within an action
        if each["cause"] == "data":
            cells[at(each["start"]) : at(each["end"])] = "d" * (at(each["end"]) - at(each["start"]))
    return "".join(cells)


def _legend(step: DrawnStep, width: int, *, ascii_only: bool) -> Iterator[str]:
    kinds = {each["kind"] for row in (*step.measured.values(), *step.planned.values()) for each in row}
    looks = {
        kind: LOOKS.get(kind, OTHER)
        for kind in sorted(kinds, key=lambda kind: list(LOOKS).index(kind) if kind in LOOKS else 99)
    }
    parts = [f"{kind}{(look.ascii if ascii_only else look.blocks) * 2} {look.word}" for kind, look in looks.items()]
    causes = {each["cause"] for row in step.idle.values() for each in row}
    parts += [f"{sign * 2} {said}" for cause, (sign, said) in CAUSES.items() if cause in causes and sign.strip()]
    line = ""
    for part in parts:
        if line and len(line) + 3 + len(part) > width:
            yield line
            line = ""
        line = f"{line}   {part}" if line else part
    if line:
        yield line


_LEAST = 0.005  # of a step: what a worker waited shorter for is not said


def _told(step: DrawnStep, width: int) -> Iterator[str]:
    """Yield lines on how long each worker waited, and for what."""
    span = step.seconds or 1.0
    for cause, seconds in step.waits_before().items():
        yield f"before it, workers waited {_time(seconds, max(span, seconds))} {_said(cause, None)}"
    for worker in step.workers:
        waits = step.waits(worker)
        causes = [
            f"{_time(seconds, span)} {_said(cause, stage)}"
            for (cause, stage), seconds in waits.items()
            if seconds >= _LEAST * span
        ]
        share = f"{sum(waits.values()) / span:.0%}".replace("%", " %")
        said = f"worker {worker} waited {share}{': ' if causes else ''}{', '.join(causes)}"
        yield from wrap(said, width, subsequent_indent="  ")


def _said(cause: str, stage: int | None) -> str:
    match cause:
        case "schedule":
            return f"for stage {stage} to compute"
        case "wire":
            return f"for messages of stage {stage} on their way"
        case "loop":
            return "between actions"
        case _:
            return f"for {CAUSES.get(cause, ('', cause))[1]}"


_EDGE, _NAMES, _ROWS, _HIGH, _PAIR = 24, 130, 860, 18, 52  # pixels


def draw_svg(step: DrawnStep) -> str:
    """Return a drawing of the step as a standalone SVG image, with details of what the pointer is on."""
    return "\n".join(_image(step)) + "\n"


def _image(step: DrawnStep) -> Iterator[str]:
    span = max(step.seconds, step.planned_seconds) or 1.0
    wide, high = 2 * _EDGE + _NAMES + _ROWS, _EDGE + 60 + _PAIR * len(step.workers)
    size = f'width="{wide}" height="{high}"'
    yield f'<svg xmlns="http://www.w3.org/2000/svg" {size} viewBox="0 0 {wide} {high}" role="img">'
    yield f"<title>{escape(_title(step))}</title><style>{STYLE}.idle{{opacity:.45}}</style>"
    yield f'<rect class="page" {size} rx="10"/>'
    yield f'<text class="title" x="{_EDGE}" y="{_EDGE + 14}">{escape(_title(step))}</text>'
    for number, worker in enumerate(step.workers):
        top = _EDGE + 34 + number * _PAIR
        yield f'<text class="word" x="{_EDGE}" y="{top + 14}">worker {worker} planned</text>'
        yield f'<text class="word" x="{_EDGE}" y="{top + 14 + _HIGH + 4}">measured</text>'
        for row, y in ((step.planned.get(worker, ()), top), (step.measured[worker], top + _HIGH + 4)):
            yield f'<rect class="lane" x="{_EDGE + _NAMES}" y="{y}" width="{_ROWS}" height="{_HIGH}" rx="3"/>'
            for each in row:
                yield _box(each, span, y, tones_of(each["kind"]), _label(each, with_stage=True))
        for each in step.idle.get(worker, ()):
            said = _said(each["cause"], each["stage"])
            yield _box(each, span, top + _HIGH + 4, "U idle", f"waits {said}")
    yield "</svg>"


def _box(each: Facts, span: float, y: float, tones: str, said: str) -> str:
    left, right = max(0.0, each["start"]) / span * _ROWS, min(span, each["end"]) / span * _ROWS
    times = f"{_time(each['start'], span)} to {_time(each['end'], span)}"
    return (
        f'<g><title>{escape(said)}&#10;{times}</title><rect class="{tones} t0" x="{_EDGE + _NAMES + left:.2f}" '
        f'y="{y}" width="{max(0.5, right - left - 0.5):.2f}" height="{_HIGH}"/></g>'
    )
