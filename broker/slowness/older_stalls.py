"""Search for stalls among steps that are no longer in memory: it reads a few of them, and more where time is missing.

known      0 |────────────────────────────────────────────────| 4000     took 5 s more than so many steps usually do
read       0 |──────|──────|──────|──────|──────|──────|──────| 4000     one part has these 5 s: that one is divided
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from statistics import median

from .lost_time import LEAST_STALL

_SAMPLED = 64  # steps at even distances that are read first
_NEAR = 3  # spans before one and after it, by whose pace it is judged
_PARTS = 8  # of a span that is divided
_SPANS, _ROUNDS = 8, 8  # spans that are divided at once, those first that miss most, and how often
_BEFORE = 17  # steps before a stall, from which the usual time then is known

Reader = Callable[[Sequence[int]], Mapping[int, float]]


def around_stalls(ends: Mapping[int, float], away: Mapping[int, float], read: Reader) -> dict[int, float]:
    """Return the ends of further steps, in seconds since the epoch, among them those of steps that stood still.

    Args:
        ends: By step, the ends that are known.
        away: Seconds before the end of a step for which a person had paused the run.
        read: Returns the ends of these steps, as far as there are records of them.
    """
    found, asked = dict(ends), set(ends)

    def learn(steps: Sequence[int]) -> None:
        new = sorted(set(steps) - asked)
        asked.update(new)
        found.update(read(new) if new else {})

    newest = max(ends, default=0)
    learn(range(0, newest, max(1, newest // _SAMPLED)))
    for _ in range(_ROUNDS):
        inner = [_dividing(*span) for span in _missing(found, away)]
        open_ones = [steps for steps in inner if not asked.issuperset(steps)]
        if not open_ones:
            break
        learn([step for steps in open_ones[:_SPANS] for step in steps])
    stalls = [last for first, last in _missing(found, away) if last == first + 1]
    learn([step for last in stalls[:_SPANS] for step in range(max(0, last - _BEFORE), last)])
    return {step: end for step, end in found.items() if step not in ends}


def _dividing(first: int, last: int) -> list[int]:
    """Return the steps that divide a span in parts, without its ends."""
    return list(range(first + 1, last, max(1, (last - first) // _PARTS)))


def _missing(found: Mapping[int, float], away: Mapping[int, float]) -> list[tuple[int, int]]:
    """Return spans that took longer than those near them, by a stall at least; the longest first.

    A span lies between two known steps.
    """
    spans = list(pairwise(sorted(found)))
    took = [found[last] - found[first] - _rested(first, last, away) for first, last in spans]
    paces = [seconds / (last - first) for (first, last), seconds in zip(spans, took, strict=True)]
    more = dict[tuple[int, int], float]()
    for place, (first, last) in enumerate(spans):
        usual = median(paces[max(0, place - _NEAR) : place + _NEAR + 1])
        more[first, last] = took[place] - (last - first) * usual
    return sorted((span for span, seconds in more.items() if seconds >= LEAST_STALL), key=lambda span: -more[span])


def _rested(first: int, last: int, away: Mapping[int, float]) -> float:
    """Return the seconds between the ends of two steps for which a person had paused the run."""
    return sum(seconds for step, seconds in away.items() if first < step <= last)
