"""The actions of a step at a stage, with the start and end of each, as a worker reports them.

A worker's list of actions depends on what its model has: frozen stages, shared parameters, a prefix that is replayed.
The broker makes schedules without the model, so a record names each action.
"""

import struct
from collections.abc import Iterable
from math import isfinite

from stageline.broker.control.records import StepRecord
from stageline.pipeline.schedule import Action, Kind

TimedAction = tuple[Action, float, float]  # an action, its start and its end in seconds since the epoch

ENTRY = struct.Struct("<cIdd")  # one action in a record's `times`: its kind, its microbatch, its start, its end
_KINDS = {kind.encode(): kind for kind in Kind if kind not in (Kind.VERDICT, Kind.ORDER)}  # those in schedules


def packed_times(timed: Iterable[TimedAction]) -> bytes:
    """Return `StepRecord.times` for the actions of one stage, in the order in which they ran."""
    return b"".join(ENTRY.pack(action.kind.encode(), action.microbatch, start, end) for action, start, end in timed)


def timed_actions(record: StepRecord) -> list[TimedAction]:
    """Return the actions of a finished step with their times. An empty list if they were not measured."""
    if unreadable_times(record.times):
        return []  # of a store that another version has written
    return [
        (Action(_KINDS[kind], record.stage, microbatch), start, end)
        for kind, microbatch, start, end in ENTRY.iter_unpack(record.times)
    ]


def unreadable_times(times: bytes, microbatches: int | None = None) -> str:
    """Return why `times` are not those of a step with so many `microbatches` (None: any), "" if they are."""
    if len(times) % ENTRY.size:
        return f"has {len(times)} bytes of times; an action takes {ENTRY.size}"
    unknown = {bytes([kind]) for kind in times[:: ENTRY.size]} - _KINDS.keys()
    if unknown:
        return f"has times of actions of unknown kinds: {sorted(unknown)}"
    for kind, microbatch, start, end in ENTRY.iter_unpack(times):
        action = f"{kind.decode()}{microbatch}"
        if microbatches is not None and microbatch >= microbatches:
            return f"has times of {action}, and a step has {microbatches} microbatches"
        if not (isfinite(start) and isfinite(end)):
            return f"has times of {action} that are not finite: {start} to {end}"
    return ""
