"""Who stood still while the last stage ended no step: a worker, or the messages between two stages.

    last stage   ... end of S-1 |──────── nothing ────────| end of S
    others          [ B3 of S-1 ───────── still there ─────] U  [F0 of S]

Only what lies between both ends counts, also of actions of the step before: other stages end that one later.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from stageline.broker.ledger.times import WaitCause

from .steps import MeasuredSteps, Ran
from .told import lasting

_MOST = 0.5  # part of the time that a cause must explain
_OWN = {WaitCause.DISK: "waited for the disk", WaitCause.SCRIPT: "waited for its script"}  # for no other worker


@dataclass(frozen=True, slots=True)
class StallCause:
    """Cause that lasted `seconds` of a stall: `hop` has the stages whose message was on its way, `text` says it all."""

    seconds: float
    text: str
    hop: tuple[int, int] | None = None


def stood_still(steps: MeasuredSteps, step: int, copy: int, seconds: float) -> StallCause | None:
    """Return what explains most of the time before the end of a step; None if nothing explains half of it.

    Args:
        steps: The step and the one before, as they were measured.
        step: The step that took longer.
        copy: Copy of the last stage.
        seconds: Seconds that it took longer.
    """
    ends = [_end(steps, copy, each) for each in (step - 1, step)]
    began, until = ends
    if until is None:
        return None
    if began is None:
        began = min(each.start for each in steps.all if each.step == step)
    found = max(_inside(steps, began, until), key=lambda each: each.seconds, default=None)
    return found if found is not None and found.seconds >= _MOST * seconds else None


def _end(steps: MeasuredSteps, copy: int, step: int) -> float | None:
    return max((each.end for each in steps.all if each.step == step and each.action.stage == copy), default=None)


def _inside(steps: MeasuredSteps, began: float, until: float) -> Iterator[StallCause]:
    """Yield what each worker did, and where messages were, between two times in seconds since the epoch."""
    for each in steps.all:
        if each.end <= began:
            continue
        name, worker = steps.schedule.name_of(each.action), f"worker {each.worker}"
        for start, end, most, did in _parts(each, name):
            if (inside := min(most, min(end, until) - max(start, began))) > 0:
                yield StallCause(inside, f"{worker} {did} for {lasting(inside)}")
        if each.source is not None and each.lag is not None:
            one, other = sorted((steps.stage_of[each.source.action.stage], steps.stage_of[each.action.stage]))
            came = each.start - sum(each.pauses.values())
            inside = min(came, until) - max(each.source.end, began)
            yield StallCause(inside, f"no message came between stages {one} and {other}", (one, other))


def _parts(ran: Ran, name: str) -> Iterator[tuple[float, float, float, str]]:
    """Yield what a worker did in an action and before it: start, end, at most how long, and in words."""
    before = ran.start - ran.over - ran.message - sum(ran.pauses.values())
    yield ran.start, ran.end, ran.computed, f"was in {name}"
    yield ran.start, ran.end, ran.data, f"drew rows in {name}"
    yield before, ran.start, ran.over, f"did nothing before {name}"
    for cause, did in _OWN.items():
        yield before, ran.start, ran.pauses.get(cause, 0.0), f"{did} before {name}"
