"""Limits of a run's pace, as text for people and as facts of JSON's own types."""

from collections import Counter
from collections.abc import Sequence

from stageline.broker.control.records import StepRecord
from stageline.pipeline.schedule import Schedule

from .findings import LEAST_STEPS, Cause, Examined, Finding, examined, median_times, with_window
from .pace import RunPace
from .remedies import Settings, Trials, remedies
from .steps import Clocks, MeasuredSteps

Facts = dict[str, object]
_IN_TURN = "; one process computes all stages in turn, so that each worker waits while another computes"
_MOST_ACTIONS = 6_000  # that are looked at; of longer steps, fewer steps


def slowness(
    schedule: Schedule,
    pace: RunPace,
    *,
    since: int,
    settings: Settings,
    clocks: Clocks,
    planned: float | None,
    in_turn: bool = False,
) -> Facts | None:
    """Return what limits a run, what to do about it, and the steps that show it; None if these are too few.

    Args:
        schedule: Schedule of the newest steps.
        pace: The newest steps.
        since: First step of that schedule.
        settings: The run's plan.
        clocks: Clocks of the workers.
        planned: Share of a step that the busiest worker waits by the plan; None if that is not known.
        in_turn: True if one process computes all stages, one after another.
    """
    steps = MeasuredSteps.of(schedule, _bounded(pace.recent(since), schedule), clocks)
    found = examined(steps, pace, in_turn=in_turn)
    if found is None:
        return None
    trials = Trials(found, settings)
    if not in_turn:
        found = with_window(found, trials.better_window[0])
    busy = [each / found.seconds if found.seconds else 0.0 for each in found.busy]
    told = [_finding(each, found, trials, clocks, pace) for each in found.findings]
    if in_turn and told:
        told[0]["text"] = f"{told[0]['text']}{_IN_TURN}"
    facts: Facts = {
        "steps": [steps.steps[0], steps.steps[-1]],
        "seconds": found.seconds,
        "limiting": {
            "worker": found.limiting,
            "stages": _stages(schedule, found.limiting),
            "busy": busy[found.limiting],
        },
        "busy": busy,
        "bubble": {"measured": max(0.0, 1 - max(busy)), "planned": planned},
        "findings": told,
    }
    return facts | {"text": _text(told, found) + (_IN_TURN if in_turn and not told else "")}


def _bounded(records: Sequence[StepRecord], schedule: Schedule) -> Sequence[StepRecord]:
    """Return the records of the newest steps that follow each other, about `_MOST_ACTIONS` actions and four steps."""
    each = max(1, sum(map(len, schedule.workers)))
    counts = Counter(record.step for record in records if record.times)
    whole = [step for step, count in sorted(counts.items()) if count == schedule.copies]
    newest = set(_newest_in_a_row(whole)[-max(LEAST_STEPS, _MOST_ACTIONS // each) :])
    return [record for record in records if record.step in newest]


def _newest_in_a_row(steps: Sequence[int]) -> list[int]:
    """Return the last of `steps` that follow each other; step 0, which loads what is loaded once, only if it must."""
    found: list[int] = []
    for step in reversed(steps):
        if found and step != found[0] - 1:
            break
        found.insert(0, step)
    return found[1:] if found[:1] == [0] and len(found) > 2 else found


def _finding(finding: Finding, found: Examined, trials: Trials, clocks: Clocks, pace: RunPace) -> Facts:
    schedule = found.steps.schedule
    return {
        "cause": str(finding.cause),
        "share": finding.gain,
        "idle": finding.idle,
        "worker": finding.worker,
        "stages": None if finding.worker is None else _stages(schedule, finding.worker),
        "hop": None if finding.hop is None else list(finding.hop),
        "since": finding.since,
        "began": None if finding.since is None else pace.ended(finding.since - 1),
        "figures": dict(finding.figures),
        "text": _SAID[finding.cause](finding, found, clocks) + _since(finding),
        "remedies": [{"do": each.do, "seconds": each.seconds, "gain": each.gain} for each in remedies(finding, trials)],
    }


def _text(told: Sequence[Facts], found: Examined) -> str:
    if not found.findings:
        waits = percent(max(0.0, 1 - max(found.busy) / found.seconds)) if found.seconds else "?"
        return (
            f"nothing limits it but its stages and their schedule: a step takes {lasting(found.seconds)}, of which the "
            f"busiest worker waits {waits}"
        )
    return "; ".join(str(each["text"]) for each in told)


def _since(finding: Finding) -> str:
    return "" if finding.since is None else f", since step {finding.since}"


def _stages(schedule: Schedule, worker: int) -> list[str]:
    return [schedule.label(copy) for copy in schedule.placement[worker]]


def percent(part: float) -> str:
    """Return a share for people: "12 %"."""
    return f"{part:.0%}".replace("%", " %")


def lasting(seconds: float) -> str:
    """Return seconds for people, with three digits: "1.2 s", "46.8 ms"."""
    for unit, factor in (("s", 1.0), ("ms", 1e3)):
        if seconds * factor >= 1:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds * 1e6:.3g} µs"


def _of_step(finding: Finding) -> str:
    return f"without that a step would be {percent(finding.gain)} shorter"


def _compute(finding: Finding, found: Examined, clocks: Clocks) -> str:
    worker = finding.worker or 0
    labels = _stages(found.steps.schedule, worker)
    name = f"stage {labels[0]}" if len(labels) == 1 else f"stages {' and '.join(labels)}"
    here, others = finding.figures["seconds"], finding.figures["others"]
    times = median_times(found.steps)
    stage = found.steps.schedule.replicas.stage(found.steps.schedule.placement[worker][0])
    actions = ", ".join(f"{kind} {lasting(of[stage])}" for kind, of in times.items() if of[stage] and kind != "U")
    host = f" on {clocks.hosts[worker]}" if worker in clocks.hosts else ""
    return (
        f"{name} (worker {worker}{host}) computes {here / others if others else 0:.2g} times as long as the others: "
        f"{lasting(here)} of a step, theirs {lasting(others)} ({actions}); it causes {percent(finding.idle)} of all "
        f"waiting, and {_of_step(finding)}"
    )


def _wire(finding: Finding, found: Examined, clocks: Clocks) -> str:
    one, other = finding.hop or (0, 1)
    lag = lasting(finding.figures["lag"])
    return f"messages between stages {one} and {other} are on their way for {lag}; {_of_step(finding)}"


def _seconds(finding: Finding) -> str:
    return lasting(finding.figures["seconds"])


def _data(finding: Finding, found: Examined, clocks: Clocks) -> str:
    return f"drawing rows from the data source takes {_seconds(finding)} of a step; {_of_step(finding)}"


def _offload(finding: Finding, found: Examined, clocks: Clocks) -> str:
    return f"activations that lie in files take {_seconds(finding)} of a step on their way; {_of_step(finding)}"


def _disk(finding: Finding, found: Examined, clocks: Clocks) -> str:
    return f"workers wait for the disk that snapshots are written to; {_of_step(finding)}"


def _window(finding: Finding, found: Examined, clocks: Clocks) -> str:
    shorter = percent(finding.gain)
    return f"schedule.window lets too few microbatches be in flight; with more, a step would be {shorter} shorter"


def _credit(finding: Finding, found: Examined, clocks: Clocks) -> str:
    return f"a stage waits {_seconds(finding)} of a step for credit: it may not run further ahead; {_of_step(finding)}"


def _room(finding: Finding, found: Examined, clocks: Clocks) -> str:
    return f"a stage waits {_seconds(finding)} of a step for room: queues.retain_bytes is full; {_of_step(finding)}"


def _script(finding: Finding, found: Examined, clocks: Clocks) -> str:
    return f"workers wait for the script between two calls; {_of_step(finding)}"


def _evaluation(finding: Finding, found: Examined, clocks: Clocks) -> str:
    return f"evaluation of the rows held out takes its time; {_of_step(finding)}"


def _switching(finding: Finding, found: Examined, clocks: Clocks) -> str:
    return f"workers wait for the order of the schedule by which the next steps go; {_of_step(finding)}"


_SAID = {
    Cause.COMPUTE: _compute,
    Cause.WINDOW: _window,
    Cause.WIRE: _wire,
    Cause.DATA: _data,
    Cause.DISK: _disk,
    Cause.CREDIT: _credit,
    Cause.ROOM: _room,
    Cause.SCRIPT: _script,
    Cause.EVALUATION: _evaluation,
    Cause.SWITCHING: _switching,
    Cause.OFFLOAD: _offload,
}
