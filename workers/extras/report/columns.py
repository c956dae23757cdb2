"""Columns of numbers of which the page draws: a timetable, and curves with as many points as a screen shows.

    actions   F0 of step 7 from 12.000000 to 12.004100      start 0, took 4100, kind 0, microbatch 0, step 0
              F1 of step 7 from 12.004200 to 12.008300      start 4200, took 4100, ...

Times are whole microseconds; a start is told by its distance from the one before it.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from stageline.pipeline.schedule import ONCE_PER_STEP
from stageline.workers.extras.drawn_steps import CAUSES, DrawnStep

Facts = Mapping[str, Any]

_UNIT = 1e-6  # seconds
_NO_STAGE = -1
_FITS = 0.9  # part of a plan that must have room before the next one: measured times are a little shorter, or longer


@dataclass(frozen=True, slots=True)
class TimetableColumns:
    """Steps to draw, as the answer `timetable` has them, in order; and labels of copies of stages."""

    steps: Sequence[Facts]
    labels: Mapping[int, str]

    @classmethod
    def of(cls, steps: Sequence[Facts], labels: Mapping[int, str]) -> "TimetableColumns":
        """Return the timetable of the steps that have any action."""
        return cls([step for step in steps if step["actions"]], labels)

    def section(self) -> dict[str, Any]:
        """Return the section of the page's data."""
        begin = min((step["start"] for step in self.steps), default=0.0)
        kinds = sorted(
            {each["kind"] for step in self.steps for each in (*step["actions"], *step["planned"])}, key=_order
        )
        causes = sorted({each["cause"] for step in self.steps for each in step["idle"]})
        workers = sorted({each["worker"] for step in self.steps for each in step["actions"]})
        newest = self.steps[-1] if self.steps else {"planned": ()}
        return {
            "origin": begin,
            "workers": [self._worker(worker) for worker in workers],
            "steps": [self._step(step, begin) for step in self.steps],
            "kinds": kinds,
            "causes": [(cause, CAUSES.get(cause, ("", cause))[1]) for cause in causes],
            "lanes": self._lanes(workers, kinds, causes, begin),
            "planned_of": self._with_plan(),
            "planned_seconds": max((each["end"] for each in newest["planned"]), default=None),
            "summary": self._summary(),
        }

    def _worker(self, worker: int) -> dict[str, Any]:
        stages = sorted({each["stage"] for step in self.steps for each in step["actions"] if each["worker"] == worker})
        return {
            "index": worker,
            "stages": stages,
            "labels": {stage: self.labels.get(stage, str(stage)) for stage in stages},
        }

    def _step(self, step: Facts, begin: float) -> dict[str, Any]:
        start = step["start"] - begin
        return {"step": step["step"], "start": start, "end": start + step["seconds"], "schedule": step["schedule"]}

    def _with_plan(self) -> list[int]:
        """Return the places of the steps above which the plan of the newest is drawn: it fits and overlaps no other."""
        if not self.steps:
            return []
        newest, found, free = self.steps[-1], list[int](), float("inf")
        seconds = max((each["end"] for each in newest["planned"]), default=0.0)
        for place, step in reversed([*enumerate(self.steps)]):
            if step["schedule"] == newest["schedule"] and step["start"] + _FITS * seconds <= free:
                found.insert(0, place)
                free = step["start"]
        return found

    def _lanes(self, workers: Sequence[int], kinds: list[str], causes: list[str], begin: float) -> list[dict[str, Any]]:
        kind_at, cause_at = ({name: at for at, name in enumerate(names)} for names in (kinds, causes))
        ran, idle, planned = (defaultdict[int, list[list[float]]](list) for _ in range(3))
        for place, step in enumerate(self.steps):
            for each in step["actions"]:
                row = [
                    each["start"] - begin,
                    each["end"] - begin,
                    kind_at[each["kind"]],
                    each["stage"],
                    _microbatch(each),
                    place,
                ]
                ran[each["worker"]].append(row)
            for each in step["idle"]:
                stage = _NO_STAGE if each["stage"] is None else each["stage"]
                idle[each["worker"]].append(
                    [each["start"] - begin, each["end"] - begin, cause_at[each["cause"]], stage]
                )
        for each in self.steps[-1]["planned"] if self.steps else ():
            row = [each["start"], each["end"], kind_at[each["kind"]], each["stage"], _microbatch(each)]
            planned[each["worker"]].append(row)
        return [
            {
                "ran": _columns(ran[worker], ("kind", "stage", "microbatch", "step")),
                "idle": _columns(idle[worker], ("cause", "stage")),
                "planned": _columns(planned[worker], ("kind", "stage", "microbatch")),
            }
            for worker in workers
        ]

    def _summary(self) -> list[dict[str, Any]]:
        """Return by worker how long it computed in the newest step, and waited for what."""
        if not self.steps:
            return []
        step, found = DrawnStep.of(self.steps[-1]), []
        seconds = step.seconds
        for worker, actions in sorted(step.measured.items()):
            computed = sum(each["end"] - each["start"] for each in actions)
            waits: dict[str, float] = defaultdict(float)
            for (cause, _), waited in step.waits(worker).items():
                waits[CAUSES.get(cause, ("", cause))[1]] += waited
            found.append(
                {
                    "worker": worker,
                    "stages": ", ".join(
                        dict.fromkeys(self.labels.get(each["stage"], str(each["stage"])) for each in actions)
                    ),
                    "computed": computed,
                    "share": computed / seconds if seconds else None,
                    "waits": list(waits.items()),
                }
            )
        return found


def _order(kind: str) -> int:
    known = "FBIWU"
    return known.index(kind) if kind in known else len(known)


def _microbatch(action: Facts) -> int:
    return -1 if action["kind"] in ONCE_PER_STEP else int(action["microbatch"])


def _columns(rows: list[list[float]], names: Sequence[str]) -> dict[str, list[int]]:
    """Return rows of a start, an end and other whole numbers as columns, in the order of starts."""
    rows.sort()
    starts = [round(row[0] / _UNIT) for row in rows]
    found = {
        "start": [start - before for before, start in zip([0, *starts], starts, strict=False)],
        "took": [max(0, round(row[1] / _UNIT) - start) for row, start in zip(rows, starts, strict=True)],
    }
    return found | {name: [int(row[2 + place]) for row in rows] for place, name in enumerate(names)}


def thinned(points: Sequence[tuple[int, float | None]], most: int) -> list[tuple[int, float | None]]:
    """Return at most about `most` of `points`: of each of `most / 2` parts the lowest and the highest, in order.

    So no peak is lost. The first and the last point stay.
    """
    if len(points) <= most:
        return list(points)
    parts = max(1, most // 2)
    kept = {0, len(points) - 1}
    for part in range(parts):
        places = range(part * len(points) // parts, (part + 1) * len(points) // parts)
        known = [place for place in places if points[place][1] is not None] or list(places[:1])
        kept |= {
            min(known, key=lambda place: points[place][1] or 0.0),
            max(known, key=lambda place: points[place][1] or 0.0),
        }
    return [points[place] for place in sorted(kept)]
