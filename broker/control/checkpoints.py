"""Control messages about checkpoints: their announcement, and transfers of snapshots between workers."""

from enum import StrEnum
from typing import Annotated

import msgspec

from .records import Count, Name

MOST_COPIES = 20_000  # transfers of snapshots that one process takes part in


class _CheckpointMessage(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="is"):
    """The base of all; the field "is" of an encoded message names its type."""


class CopyState(StrEnum):
    """State of the transfer of a snapshot at one of its two ends."""

    READY = "ready"  # the receiving end awaits the first chunk
    MOVING = "moving"
    DONE = "done"  # at the receiving end, the snapshot is on the disk and was read back
    LACKING = "lacking"  # the sending end does not have the snapshot
    FAILED = "failed"  # what the receiving end has cannot be used
    SPENT = "spent"  # the end has given the transfer up, and takes no part in it again


class CopyOrder(_CheckpointMessage, frozen=True, tag="copy"):
    """An order to transfer a snapshot.

    Attributes:
        number: The transfer's number; no two transfers of a run have the same.
        stage: The stage.
        step: The snapshot's step.
        queue: The queue that carries it.
    """

    number: Count
    stage: Count
    step: Count
    queue: Name


class CopyReport(_CheckpointMessage, frozen=True, tag="copies"):
    """A worker's part in transfers of snapshots.

    Attributes:
        states: The transfers that the worker knows, by number, each with its state.
        chunks: Chunks of snapshots that the worker has sent or received.
        lacks: (stage, step) of each snapshot that the worker begins with, and that is not on its disk.
    """

    states: Annotated[list[tuple[Count, CopyState]], msgspec.Meta(max_length=MOST_COPIES)] = []
    chunks: Count = 0
    lacks: Annotated[list[tuple[Count, Count]], msgspec.Meta(max_length=MOST_COPIES)] = []


NO_COPIES = CopyReport()


class Trim(_CheckpointMessage, frozen=True, tag="trim"):
    """An announcement that checkpoint `step` is complete.

    Queues may be trimmed to it and older snapshots deleted, except those of step `best`, which is that of the best
    round of evaluation before `step`. In a run without snapshots: every stage has finished the steps before `step`.
    """

    step: int
    best: Count | None = None


class Copying(_CheckpointMessage, frozen=True, tag="copying"):
    """The transfers of snapshots that a worker takes part in now: a transfer that is not among them is over.

    Sent again until the worker reports just these. `lost` are snapshots that the worker lacks, and that no other worker
    holds.
    """

    orders: tuple[CopyOrder, ...] = ()
    lost: tuple[tuple[Count, Count], ...] = ()
