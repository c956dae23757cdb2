"""Times of a stage's actions and waits in a step, as the bytes of a `StepRecord`.

    [F 3, start, end] [m 1, start, end] [F 4, start, end] ...     upper case: an action, lower case: a wait

A wait stands before the action that it held up. Its number is the stage at the other end of the queue; waits for data
and for offloaded activations lie in the action that follows. Waits shorter than `LEAST` are not kept.
"""

import struct
from collections.abc import Iterator
from enum import StrEnum
from math import isfinite
from string import ascii_uppercase
from typing import NamedTuple

from stageline.broker.control.records import StepRecord
from stageline.pipeline.schedule import Action, Kind

LEAST = 5e-5  # seconds: below, it is the loop itself
ENTRY = struct.Struct("<cIdd")  # one action or wait: its letter, its number, its start, its end
NO_STAGE = 2**32 - 1  # the number of a wait for no other stage


class WaitCause(StrEnum):
    """A reason why a worker does not compute; the value is the letter of its entries."""

    MESSAGE = "m"  # has not come from the stage with this number
    CREDIT = "c"  # has not been granted by the stage with this number
    ROOM = "r"  # to keep what was computed until the stage with this number has taken it
    DATA = "d"  # the source draws rows: lies within the action
    DISK = "s"  # a snapshot is copied, or the one before it is still being written
    SCRIPT = "u"  # the next call of the script has not come
    EVALUATION = "e"  # rows held out are evaluated, or the verdict on that has not come
    SWITCHING = "o"  # the order by which the next step goes has not come
    PAUSED = "p"  # a person has paused the run before this step
    OFFLOAD = "f"  # activations come from files, or wait for room on their way there: lies within the action

    __hash__ = str.__hash__


TimedAction = tuple[Action, float, float]  # an action, its start and its end in seconds since the epoch


class TimedWait(NamedTuple):
    """A wait of a worker from `start` to `end`, in seconds since the epoch.

    `other` is the stage at the other end of the queue that is waited for, None if there is none. `before` is the action
    that the wait held up, or in which it lies; None if the step had no further one.
    """

    cause: WaitCause
    other: int | None
    start: float
    end: float
    before: Action | None = None


# Those of operations in a step; a feature may have kinds that are not known here.
_KINDS: dict[bytes, str] = {letter.encode(): letter for letter in ascii_uppercase}
_KINDS |= {kind.encode(): kind for kind in Kind}
LETTERS = {cause: cause.encode() for cause in WaitCause}
_WAITS = {letter: cause for cause, letter in LETTERS.items()}
_NAMED: dict[bytes, str] = _KINDS | _WAITS


def timed_actions(record: StepRecord) -> list[TimedAction]:
    """Return the actions of a finished step with their times; an empty list if they were not measured."""
    return [each for each in timed_entries(record) if not isinstance(each, TimedWait)]


def timed_waits(record: StepRecord) -> list[TimedWait]:
    """Return the waits of a stage in a finished step; an empty list if none was measured."""
    return [each for each in timed_entries(record) if isinstance(each, TimedWait)]


def timed_entries(record: StepRecord) -> list[TimedAction | TimedWait]:
    """Return the actions and waits of a finished step, in the order in which they are kept."""
    found = list(_entries(record))
    following: Action | None = None
    for place in reversed(range(len(found))):
        each = found[place]
        if isinstance(each, TimedWait):
            found[place] = each._replace(before=following)
        else:
            following = each[0]
    return found


def plain_entries(times: bytes) -> Iterator[tuple[str, int, float, float]]:
    """Yield each entry of a record's times: a kind or a `WaitCause`, its number, its start and its end.

    There is none if the times cannot be read.
    """
    if not unreadable_times(times):
        for letter, number, start, end in ENTRY.iter_unpack(times):
            yield _NAMED[letter], number, start, end


def _entries(record: StepRecord) -> Iterator[TimedAction | TimedWait]:
    for named, number, start, end in plain_entries(record.times):
        if isinstance(named, WaitCause):
            yield TimedWait(named, None if number == NO_STAGE else number, start, end)
        else:
            yield Action(named, record.stage, number), start, end


class StepTotals(NamedTuple):
    """Totals of a stage in a step, in seconds: its start and end, and how long it computed and waited for what.

    `data` and `offload` lie within actions, and are no part of `busy`: that time computes nothing. `ahead` is by
    how much the broker's clock was ahead of the worker's, by which the times are; None if that is not known.
    """

    step: int
    start: float
    end: float
    busy: float
    data: float
    disk: float
    script: float
    evaluation: float
    switching: float
    message: float = 0.0
    credit: float = 0.0
    room: float = 0.0
    paused: float = 0.0
    offload: float = 0.0
    ahead: float | None = None


def last_end(times: bytes) -> float | None:
    """Return the end of the last action in a record's times; None if there is none that can be read."""
    for place in range(len(times) - ENTRY.size, -1, -ENTRY.size):
        letter, _, _, end = ENTRY.unpack_from(times, place)
        if letter not in _WAITS:
            return float(end) if letter in _KINDS and isfinite(end) else None
    return None


_SUMMED = tuple(WaitCause[name.upper()] for name in StepTotals._fields[4:-1])


def totals(record: StepRecord) -> StepTotals | None:
    """Return the sums of a record's times; None if it has none, or they cannot be read."""
    if not record.times or len(record.times) % ENTRY.size:
        return None
    first, last, busy = float("inf"), float("-inf"), 0.0
    waited = dict.fromkeys(_WAITS, 0.0)
    for letter, _, start, end in ENTRY.iter_unpack(record.times):
        if letter in waited:
            waited[letter] += end - start
        else:
            first, last, busy = min(first, start), max(last, end), busy + end - start
    summed = [waited[cause.encode()] for cause in _SUMMED]
    within = waited[LETTERS[WaitCause.DATA]] + waited[LETTERS[WaitCause.OFFLOAD]]
    return StepTotals(record.step, first, last, max(0.0, busy - within), *summed)


def unreadable_times(times: bytes, microbatches: int | None = None) -> str:
    """Return why `times` are not those of a step with `microbatches` microbatches; "" if they are.

    Without `microbatches`, any number of them is accepted.
    """
    if len(times) % ENTRY.size:
        return f"has {len(times)} bytes of times; an action takes {ENTRY.size}"
    unknown = {bytes([kind]) for kind in set(times[:: ENTRY.size])} - _NAMED.keys()
    if unknown:
        return f"has times of actions of unknown kinds: {sorted(unknown)}"
    for kind, microbatch, start, end in ENTRY.iter_unpack(times):
        if microbatches is not None and microbatch >= microbatches and kind not in _WAITS:
            return f"has times of {kind.decode()}{microbatch}, and a step has {microbatches} microbatches"
        if not isfinite(start + end):  # of either one
            return f"has times of {kind.decode()}{microbatch} that are not finite: {start} to {end}"
    return ""
