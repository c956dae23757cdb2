"""Findings: which causes limit a run, how much of a step each of them takes, and since which step.

A cause is named if steps without it would be clearly shorter, or if it alone would make them clearly longer than steps
without any cause: of two causes that limit a run in turn, taking one away shortens little.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import pairwise
from statistics import median_low

from stageline.broker.ledger.times import StepTotals, WaitCause
from stageline.pipeline.schedule import Kind

from .pace import RunPace, changed_at
from .retimed import Hop, Otherwise, Retimed
from .steps import MeasuredSteps

SHORTER = 0.10  # share of a step that a cause takes at least
LONGER = 0.25  # share of a step that a cause takes at least where no other is
SOME = 0.02  # share of a step that such a cause takes at least beside the others
BESIDE = 0.4  # share of the largest that another cause must have
SLOWER = 1.3  # times as long as the others, which a slow worker computes at least
LEAST_STEPS = 4  # to say anything
_HOPS = 4  # with the longest lags, that are judged one by one: of a long line, that takes most of the time
_SLOW = 6  # workers that compute longest, likewise
_LONGEST = 200  # newest steps over which pauses are averaged


class Cause(StrEnum):
    """A cause for which a run is slow."""

    COMPUTE = "compute"
    WINDOW = "window"
    WIRE = "wire"
    DATA = "data"
    DISK = "disk"
    CREDIT = "credit"
    ROOM = "room"
    SCRIPT = "script"
    EVALUATION = "evaluation"
    SWITCHING = "switching"
    OFFLOAD = "offload"


_PAUSES = {
    Cause.DATA: WaitCause.DATA,
    Cause.DISK: WaitCause.DISK,
    Cause.CREDIT: WaitCause.CREDIT,
    Cause.ROOM: WaitCause.ROOM,
    Cause.SCRIPT: WaitCause.SCRIPT,
    Cause.EVALUATION: WaitCause.EVALUATION,
    Cause.SWITCHING: WaitCause.SWITCHING,
    Cause.OFFLOAD: WaitCause.OFFLOAD,
}
_CONSUMERS = (
    Cause.CREDIT,
    Cause.ROOM,
)  # an effect where the consumer is slow: counts only if steps are shorter without


@dataclass(frozen=True, slots=True)
class Finding:
    """A cause that limits a run.

    Attributes:
        cause: The cause.
        gain: Share of a step by which it would be shorter without the cause.
        idle: Share of the time in which workers wait that the cause takes.
        worker: The worker that is slow, of COMPUTE; else None.
        hop: The stages between which messages are slow, of WIRE; None if all hops together are.
        figures: Numbers about it, in seconds unless their name says otherwise.
        since: The first step that it took so long, as far as is known; None if it did in every known step.
    """

    cause: Cause
    gain: float
    idle: float
    worker: int | None = None
    hop: Hop | None = None
    figures: Mapping[str, float] = field(default_factory=dict)
    since: int | None = None


@dataclass(frozen=True, slots=True)
class Suspect:
    """A cause that may limit a run: the steps without it, and a measure of it by step if there is one."""

    cause: Cause
    without: Otherwise
    figures: Mapping[str, float]
    worker: int | None = None
    hop: Hop | None = None


@dataclass(frozen=True, slots=True)
class Examined:
    """Steps of a run, and what limits them.

    Attributes:
        steps: The steps that were looked at.
        retimed: The same, to be timed otherwise.
        seconds: Time of a step, as it was measured.
        limiting: The worker that computes most.
        busy: By worker, the seconds of a step in which it computes.
        findings: What limits them, the largest first.
    """

    steps: MeasuredSteps
    retimed: Retimed
    seconds: float
    limiting: int
    busy: tuple[float, ...]
    findings: tuple[Finding, ...]


def examined(steps: MeasuredSteps, pace: RunPace, *, in_turn: bool = False) -> Examined | None:
    """Return what limits the steps; None if there are too few to say.

    Args:
        steps: Steps.
        pace: Sums of more steps: pauses are averaged over these, and the beginning of a cause is looked for in them.
        in_turn: True if one process computes all stages: then neither messages nor credit are a cause.
    """
    if len(steps.steps) < LEAST_STEPS:
        return None
    retimed = Retimed(steps, _paused(steps, pace))
    busy = steps.busy()
    findings = (replace(each, since=_since(each, steps, pace)) for each in _named(steps, retimed, busy, in_turn))
    limiting = max(range(len(busy)), key=lambda worker: busy[worker])
    return Examined(steps, retimed, steps.seconds, limiting, busy, tuple(findings))


def with_window(found: Examined, gain: float) -> Examined:
    """Return `found` with the run's window among its findings, if steps are shorter by `gain` with another."""
    if gain < SHORTER:
        return found
    findings = sorted([*found.findings, Finding(Cause.WINDOW, gain, 0.0)], key=lambda each: -each.gain)
    return replace(found, findings=tuple(findings))


def _paused(steps: MeasuredSteps, pace: RunPace) -> dict[int, dict[WaitCause, float]]:
    """Return the pauses of each worker over a longer time; of those that all share, the shortest."""
    found = pace.paused(steps.schedule, _LONGEST)
    for cause in (WaitCause.SCRIPT, WaitCause.EVALUATION, WaitCause.SWITCHING):
        least = min((of.get(cause, 0.0) for of in found.values()), default=0.0)
        for of in found.values():
            of[cause] = least
    return found


def _named(steps: MeasuredSteps, retimed: Retimed, busy: Sequence[float], in_turn: bool) -> list[Finding]:
    """Return the suspects that limit the steps, the largest first."""
    base = _without_effects(retimed)
    now = retimed.seconds(base)
    suspects, rest = _judged(_suspects(steps, retimed, busy), in_turn)
    least = retimed.seconds(_joined(base, rest, *(each.without for each in suspects)))
    found = []
    for each in suspects:
        shorter = 1 - retimed.seconds(_joined(base, each.without)) / now if now else 0.0
        others = [other.without for other in suspects if other is not each]
        alone = retimed.seconds(_joined(base, rest, *others))
        longer = 0.0 if each.cause in _CONSUMERS or not alone else 1 - least / alone
        found.append((each, shorter, longer))
    most = max((max(shorter, longer) for _, shorter, longer in found), default=0.0)
    named = [
        (each, shorter, longer)
        for each, shorter, longer in found
        if shorter >= SHORTER or (shorter >= SOME and longer >= max(LONGER, BESIDE * most))
    ]
    named.sort(key=lambda one: -max(one[1], one[2]))
    return [_finding(each, shorter, now, busy) for each, shorter, _ in _of_all_hops(named)]


def _judged(suspects: list[Suspect], in_turn: bool) -> tuple[list[Suspect], Otherwise]:
    """Return the suspects that are judged one by one, and the steps without the other hops and slow workers."""
    hops = sorted((each for each in suspects if each.cause is Cause.WIRE), key=lambda each: -each.figures["lag"])
    slow = [each for each in suspects if each.cause is Cause.COMPUTE]
    left = sorted(slow, key=lambda each: -each.figures["seconds"])[_SLOW:] + (hops if in_turn else hops[_HOPS:])
    out = [*left, *(each for each in suspects if in_turn and each.cause is Cause.CREDIT)]
    return [each for each in suspects if each not in out], _joined(*(each.without for each in left))


def _finding(suspect: Suspect, shorter: float, now: float, busy: Sequence[float]) -> Finding:
    waiting = len(busy) * now - sum(busy)
    speed = suspect.without.speed
    saved = sum(each * (1 - speed.get(worker, 1.0)) for worker, each in enumerate(busy))
    idle = (len(busy) * now * shorter - saved) / waiting if waiting > 0 else 0.0
    bounded = min(1.0, max(0.0, idle))
    return Finding(suspect.cause, shorter, bounded, suspect.worker, suspect.hop, suspect.figures)


def _without_effects(retimed: Retimed) -> Otherwise:
    """Return the steps without waits for credit and room that are an effect of a slow consumer."""
    found = [pause for cause in _CONSUMERS if retimed.pauses_for(pause := _PAUSES[cause])]
    now = retimed.seconds() if found else 0.0
    effects = (
        pause for pause in found if now and 1 - retimed.seconds(Otherwise(without=frozenset([pause]))) / now < SHORTER
    )
    return Otherwise(without=frozenset(effects))


def _joined(*each: Otherwise) -> Otherwise:
    """Return all differences together."""
    speed = {worker: factor for one in each for worker, factor in one.speed.items()}
    without = frozenset[WaitCause]().union(*(one.without for one in each))
    return Otherwise(speed, without, frozenset[Hop]().union(*(one.instant for one in each)))


def _suspects(steps: MeasuredSteps, retimed: Retimed, busy: Sequence[float]) -> "list[Suspect]":
    found = [_slow(worker, busy) for worker in range(len(busy)) if _is_slow(worker, busy)]
    found += [_slow_hop(pair, retimed) for pair in _hops(retimed)]
    found += [
        Suspect(cause, Otherwise(without=frozenset([pause])), {"seconds": _paused_in(steps, pause)})
        for cause, pause in _PAUSES.items()
        if retimed.pauses_for(pause)
    ]
    return found


def _is_slow(worker: int, busy: Sequence[float]) -> bool:
    others = [each for index, each in enumerate(busy) if index != worker]
    return bool(others) and busy[worker] > SLOWER * median_low(others)


def _slow(worker: int, busy: Sequence[float]) -> Suspect:
    usual = median_low([each for index, each in enumerate(busy) if index != worker])
    speed = {worker: usual / busy[worker] if busy[worker] else 1.0}
    return Suspect(Cause.COMPUTE, Otherwise(speed), {"seconds": busy[worker], "others": usual}, worker)


def _hops(retimed: Retimed) -> list[Hop]:
    """Return the pairs of neighbouring stages between which some message was waited for."""
    return sorted({(min(hop), max(hop)) for hop in retimed.lags if hop[0] != hop[1]})


def _slow_hop(pair: Hop, retimed: Retimed) -> Suspect:
    both = frozenset([pair, (pair[1], pair[0])])
    lags = [retimed.lags[hop] for hop in both if hop in retimed.lags]
    return Suspect(Cause.WIRE, Otherwise(instant=both), {"lag": max(lags, default=0.0)}, hop=pair)


def _of_all_hops(named: list[tuple[Suspect, float, float]]) -> list[tuple[Suspect, float, float]]:
    """Return the named suspects, of slow hops those alone that stand out from the others."""
    lags = {each.hop: each.figures["lag"] for each, _, _ in named if each.cause is Cause.WIRE}
    most = max(lags.values(), default=0.0)
    return [one for one in named if one[0].cause is not Cause.WIRE or one[0].figures["lag"] >= most / 2]


def _paused_in(steps: MeasuredSteps, pause: WaitCause) -> float:
    """Return the longest that a worker paused for a cause, in seconds of a step."""
    count = max(1, len(steps.steps))
    return max(sum(each.paused_for(pause) for each in actions) for actions in steps.workers) / count


_SERIES: Mapping[Cause, str] = {
    Cause.DATA: "data",
    Cause.SCRIPT: "script",
    Cause.EVALUATION: "evaluation",
    Cause.SWITCHING: "switching",
    Cause.OFFLOAD: "offload",
}


def _since(finding: Finding, steps: MeasuredSteps, pace: RunPace) -> int | None:
    """Return the step since which the cause takes so long; None if it did in all known steps."""
    schedule = steps.schedule
    if finding.cause is Cause.COMPUTE and finding.worker is not None:
        return changed_at(_summed(pace, schedule.placement[finding.worker], lambda each: each.busy))
    if (name := _SERIES.get(finding.cause)) is not None:
        return changed_at(_summed(pace, range(schedule.copies), lambda each: float(getattr(each, name))))
    if finding.cause in (Cause.WIRE, Cause.ROOM, Cause.CREDIT):
        ends = list(pace.history(0))
        times = [(later.step, later.end - earlier.end) for earlier, later in pairwise(ends)]
        return changed_at(times)
    return None


def _summed(pace: RunPace, copies: Sequence[int], value: Callable[[StepTotals], float]) -> list[tuple[int, float]]:
    """Return the sum of a value over copies by step, for the steps that all have."""
    of = [{each.step: value(each) for each in pace.history(copy)} for copy in copies]
    shared = set(of[0]).intersection(*of[1:]) if of else set()
    return [(step, sum(each[step] for each in of)) for step in sorted(shared)]


_COUNTED = (Kind.FORWARD, Kind.BACKWARD, Kind.INPUT, Kind.WEIGHT, Kind.UPDATE)


def median_times(steps: MeasuredSteps) -> dict[str, tuple[float, ...]]:
    """Return the median times of F, B, I, W and U by stage, in seconds; of replicas, those of the slowest."""
    found = {
        str(kind): [0.0] * steps.schedule.stages
        for kind in (Kind.FORWARD, Kind.BACKWARD, Kind.INPUT, Kind.WEIGHT, Kind.UPDATE)
    }
    for (copy, kind), seconds in steps.usual.items():
        if kind in found:
            stage = steps.stage_of[copy]
            found[kind][stage] = max(found[kind][stage], seconds)
    return {kind: tuple(times) for kind, times in found.items()}
