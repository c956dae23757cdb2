"""The actions of a step at a stage, with the start and end of each, as a worker reports them.

A worker's list of actions depends on what its model has: frozen stages, shared parameters, a prefix that is replayed.
The broker makes schedules without the model, so a record names each action.
"""

import struct
from collections.abc import Iterable

from stageline.broker.control.records import StepRecord
from stageline.pipeline.schedule import Action, Kind

TimedAction = tuple[Action, float, float]  # an action, its start and its end in seconds since the epoch

ENTRY = struct.Struct("<cIdd")  # one action in a record's `times`: its kind, its microbatch, its start, its end
_KINDS = {kind.encode(): kind for kind in Kind}


def packed_times(timed: Iterable[TimedAction]) -> bytes:
    """Returns `StepRecord.times` for the actions of one stage, in the order in which they ran."""
    return b"".join(ENTRY.pack(action.kind.encode(), action.microbatch, start, end) for action, start, end in timed)


def timed_actions(record: StepRecord) -> list[TimedAction]:
    """Returns the actions of a finished step with their times. An empty list if they were not measured."""
    if unreadable_times(record.times):
        return []  # of a store that another version has written
    return [
        (Action(_KINDS[kind], record.stage, microbatch), start, end)
        for kind, microbatch, start, end in ENTRY.iter_unpack(record.times)
    ]


def unreadable_times(times: bytes) -> str:
    """Returns why `times` do not consist of actions, "" if they do."""
    if len(times) % ENTRY.size:
        return f"has {len(times)} bytes of times; an action takes {ENTRY.size}"
    unknown = {bytes([kind]) for kind in times[:: ENTRY.size]} - _KINDS.keys()
    return f"has times of actions of unknown kinds: {sorted(unknown)}" if unknown else ""
