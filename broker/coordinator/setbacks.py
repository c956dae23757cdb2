"""Answer to how much time a run lost to losses, restarts of its broker and stalls, and what to do about it.

Known from the milestones and from the ends of the last stage's steps: those in memory, and around older losses and
stalls those in the store. Milestones are by the broker's clock, ends by that of the worker, which may be off, and is
another one after a loss: ends are moved to the broker's clock, each by the offset of its time.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence

from stageline.broker.ledger.milestones import Milestone
from stageline.broker.ledger.times import StepTotals, last_end, totals
from stageline.broker.slowness.lost_time import Setback, StepEnds
from stageline.broker.slowness.older_stalls import around_stalls
from stageline.broker.slowness.standstill import StallCause, stood_still
from stageline.broker.slowness.steps import MeasuredSteps
from stageline.broker.slowness.told import lasting, percent

from .pacing import clocks_of, fill, schedule_at
from .state import RunState

Facts = dict[str, object]

SHOWN = 5  # the most expensive ones
_MOST_READ = 2000  # records in all
_LONGEST = 200  # steps around a loss that are read
_EARLIER, _LATER = 8, 16  # steps before a checkpoint, and beyond two intervals after it


def lost_time(run: RunState) -> Facts | None:
    """Return what the run lost time to, the most expensive first; None if it lost none, as far as is known."""
    fill(run)
    copy, events = run.config.schedule.stages - 1, run.milestones.events
    clock = _Clock(run, copy)
    known = [clock.moved(each) for each in run.pace.history(copy)]
    found = StepEnds.of(known, _older_ends(run, known, clock, events), run.pauses.seconds).setbacks(events)
    if not found or not known:
        return None
    elapsed = known[-1].end - _began(run, known[0].start)
    seconds = sum(each.seconds for each in found)
    shown = sorted(found, key=lambda each: -each.seconds)[:SHOWN]
    told = [_told(run, each) for each in shown]
    part = min(1.0, seconds / elapsed) if elapsed > 0 else 0.0
    return {
        "seconds": seconds,
        "share": part,
        "count": len(found),
        "setbacks": told,
        "remedies": list(_remedies(run, found, told)),
        "text": f"{lasting(seconds)} of its time, {percent(part)}, were lost to {_counted(found)}",
    }


class _Clock:
    """The clock of a stage's worker, as far as the broker knows it."""

    def __init__(self, run: RunState, copy: int) -> None:
        self.copy = copy
        self._now = clocks_of(run).ahead.get(run.config.schedule.owner(copy), 0.0)

    def at(self, seconds: float, offset: float | None = None) -> float:
        """Return a time of the worker by the broker's clock; `offset` is that of this time, if it is known."""
        return seconds + (self._now if offset is None else offset)

    def moved(self, each: StepTotals) -> StepTotals:
        """Return the sums of a step with its times by the broker's clock."""
        return each._replace(start=self.at(each.start, each.ahead), end=self.at(each.end, each.ahead))


def _older_ends(
    run: RunState, sums: Iterable[StepTotals], clock: _Clock, events: Sequence[Milestone]
) -> dict[int, float]:
    """Return the ends of steps that are not in memory: around events, the newest first, and around older stalls."""
    known = {each.step: each.end for each in sums}
    wanted: dict[int, None] = {}
    for event in reversed(events):
        after = event.step + min(_LONGEST, 2 * _every(run) + _LATER)
        around = range(max(0, event.step - _EARLIER), min(run.ledger.finished_floor, after))
        wanted |= {step: None for step in around if step not in known}

    def read(steps: Sequence[int]) -> dict[int, float]:
        records = run.store.records([(clock.copy, step) for step in steps])
        return {each.step: clock.at(end) for each in records if (end := last_end(each.times)) is not None}

    older = read([*{0: None, **wanted}][:_MOST_READ])
    return older | around_stalls(older | known, run.pauses.seconds, read)


def _began(run: RunState, default: float) -> float:
    first = run.store.record(0, 0)
    found = None if first is None else totals(first)
    return default if found is None else min(default, _Clock(run, 0).moved(found).start)


def _every(run: RunState) -> int:
    recovery = run.config.settings.get("recovery")
    every = recovery.get("snapshot_every", 20) if isinstance(recovery, Mapping) else 20
    return every if isinstance(every, int) else 20


def _counted(found: Sequence[Setback]) -> str:
    """Return how many there are of each kind, in words."""
    names = {"loss": ("loss", "losses"), "broker": ("restart of the broker", "restarts of the broker")}
    names["stall"] = ("stall", "stalls")
    counts = {what: sum(each.what == what for each in found) for what in names}
    return ", ".join(f"{count} {names[what][count > 1]}" for what, count in counts.items() if count)


def _told(run: RunState, setback: Setback) -> Facts:
    still = _stalled_at(run, setback) if setback.what == "stall" else None
    facts: Facts = {
        "what": setback.what,
        "at": setback.at,
        "step": setback.step,
        "seconds": setback.seconds,
        "waited": setback.waited,
        "workers": list(setback.workers),
        "hop": list(still.hop) if still and still.hop else None,
    }
    return facts | {"text": f"{_said(setback, still)}, at step {setback.step}: {lasting(setback.seconds)}"}


def _said(setback: Setback, still: StallCause | None) -> str:
    match setback.what:
        case "loss":
            others = "".join(f", worker {each} too" for each in setback.workers[1:])
            again = max(0.0, setback.seconds - setback.waited)
            parts = f"{lasting(setback.waited)} until the place worked again and {lasting(again)} to repeat steps"
            return f"worker {setback.workers[0]} {setback.why}{others} ({parts})"
        case "broker":
            return "the broker was started again"
        case _:
            return "no step ended, and it is not recorded who stood still" if still is None else still.text


def _stalled_at(run: RunState, setback: Setback) -> StallCause | None:
    """Return who stood still before the end of a step, or between which stages no message came; None if unknown."""
    schedule, _ = schedule_at(run, setback.step)
    both = (each for each in (setback.step - 1, setback.step) if each >= 0)
    records = run.store.records([(copy, each) for each in both for copy in range(schedule.copies)])
    steps = MeasuredSteps.of(schedule, records, clocks_of(run))
    return stood_still(steps, setback.step, schedule.stages - 1, setback.seconds)


def _remedies(run: RunState, found: Sequence[Setback], told: Sequence[Facts]) -> Iterator[Facts]:
    """Yield what to do, each with the seconds that it would have saved, as far as that can be told."""
    losses, every = [each for each in found if each.what == "loss"], _every(run)
    waited = sum(each.waited for each in losses)
    again = sum(each.seconds - each.waited for each in losses)
    fewer = max(1, every // 4)
    if losses and again >= waited and every > 1:
        do = f"take snapshots more often: recovery.snapshot_every = {fewer} in place of {every}"
        yield {"do": do, "seconds": again * (1 - fewer / every)}
    elif any("was silent" in each.why for each in losses):
        do = f"notice silent workers sooner: a recovery.lease below {run.config.lease:g} s"
        yield {"do": do, "seconds": None}
    elif losses:
        yield {"do": "keep a process that has loaded the model: stageline worker CONFIG --spare", "seconds": None}
    if hops := [hop for each in told if isinstance(hop := each["hop"], list)]:
        one, other = hops[0]
        yield {"do": f"look at the link between the machines of stages {one} and {other}", "seconds": None}
    if any(each["what"] == "stall" and not each["hop"] for each in told):
        yield {"do": "see what else ran then on the machine of a worker that stood still", "seconds": None}
    if any(each.what == "broker" for each in found):
        yield {"do": "see in the broker's log why it ended: stageline logs", "seconds": None}
