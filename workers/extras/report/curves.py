"""Curves of a run over time: steps per second, losses, and the events between them.

A broker tells when steps ended, of a few hundred at even distances; the times of the others lie between those.
"""

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from stageline.workers.runs.folder import Facts
from stageline.workers.runs.metrics import MetricsTail, StepMetrics

from .columns import thinned

MOST_LOSSES = 1500  # points of the loss that the page has
_KEPT = 4 * MOST_LOSSES  # that are held while a run goes on

_SAID = {
    "loss": "worker {worker} was lost",
    "leave": "worker {worker} left on notice",
    "return": "worker {worker} works again",
    "broker": "the broker was started again",
    "resume": "the run was resumed at step {step}",
    "pause": "the run was paused {why}, before step {step}",
    "pause-end": "the run went on {why}, with step {step}",
    "checkpoint": "checkpoint of step {step}",
}

Points = list[tuple[int, float | None]]


class MeasuredLosses:
    """Losses of every step, from the metrics in the folder of a run, read as they are written; thinned out."""

    def __init__(self, folder: Path | None) -> None:
        """Take the folder of a run; None if it is not on this machine."""
        self._tail = None if folder is None else MetricsTail(folder)
        self._points: Points = []

    def points(self, known: Mapping[str, float | None]) -> Points:
        """Return losses by step, in order; for a run without metrics here, those that its broker has kept (`known`)."""
        for line in [] if self._tail is None else self._tail.read():
            if isinstance(line, StepMetrics) and (not self._points or line.step > self._points[-1][0]):
                self._points.append((line.step, line.loss))
        if len(self._points) > _KEPT:
            self._points = thinned(self._points, MOST_LOSSES)
        return thinned(self._points or sorted((int(step), loss) for step, loss in known.items()), MOST_LOSSES)


class StepClock:
    """Times at which steps ended, of which a few are known."""

    def __init__(self, ends: Iterable[Sequence[float]]) -> None:
        """Take pairs of a step and its end in seconds; one that ends before an earlier step is left out."""
        self.ends: list[tuple[int, float]] = []
        for step, at in sorted((int(step), float(at)) for step, at in ends):
            if not self.ends or at > self.ends[-1][1]:
                self.ends.append((step, at))
        self._steps = [step for step, _ in self.ends]

    def rates(self) -> list[float]:
        """Return the steps per second between two known ends, for the second and later ones."""
        return [(step - before) / (at - since) for (before, since), (step, at) in pairwise(self.ends)]

    def end_of(self, step: int) -> float | None:
        """Return when a step ended, by those around it; None before the first known one and after the last."""
        place = bisect_left(self._steps, step)
        if place == len(self.ends) or (place == 0 and self._steps[0] != step):
            return None
        later, at = self.ends[place]
        if later == step:
            return at
        earlier, since = self.ends[place - 1]
        return since + (at - since) * (step - earlier) / (later - earlier)


def curves(course: Facts, milestones: Iterable[Facts], evaluations: Sequence[Facts], losses: Points) -> dict[str, Any]:
    """Return the section of the page's data.

    Args:
        course: The answer `course`.
        milestones: Losses of workers, their returns and checkpoints, as the answer `history` has them.
        evaluations: Rounds of evaluation, as the answer `status` has them.
        losses: Losses by step, in order.
    """
    clock = StepClock(course["ends"])
    events = [*_events(milestones), *_rounds(evaluations, clock)]
    placed = [(at, step, loss) for step, loss in losses if (at := clock.end_of(step)) is not None]
    rated = [(at, step, rate) for (step, at), rate in zip(clock.ends[1:], clock.rates(), strict=True)]
    return {
        "rates": _columns(rated),
        "losses": _columns(placed),
        "evaluations": [{**each, "at": clock.end_of(each["step"] - 1)} for each in evaluations],
        "events": sorted(events, key=lambda each: float(each["at"])),
        "workers": course["workers"],
    }


def _columns(rows: Sequence[tuple[float, int, float | None]]) -> dict[str, list[Any]]:
    return {name: [row[place] for row in rows] for place, name in enumerate(("at", "step", "value"))}


def _events(milestones: Iterable[Facts]) -> Iterator[Facts]:
    for each in milestones:
        of_worker = each["worker"] is not None and each["why"]
        text = f"worker {each['worker']} {each['why']}" if of_worker else _SAID[each["what"]].format(**each)
        yield {"at": each["at"], "what": each["what"], "text": text}


def _rounds(evaluations: Iterable[Facts], clock: StepClock) -> Iterator[Facts]:
    for each in evaluations:
        if (at := clock.end_of(each["step"] - 1)) is not None:
            yield {"at": at, "what": "evaluation", "text": f"evaluation after {each['step']} steps"}
