"""What `stageline checkpoint ls` and `verify` print with --json."""

import msgspec

from stageline.workers.checkpoint.source import CheckpointRow, SnapshotState


class GoesOnFrom(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The run, and its step, that another one goes on from in another layout."""

    run: str
    step: int


class CheckpointList(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The checkpoints that `stageline checkpoint ls` finds.

    Attributes:
        stages: Number of stages of the run, replicas counted one by one.
        goes_on_from: Run that this one goes on from in another layout; None if it began by itself.
        checkpoints: The oldest first.
    """

    run: str
    folder: str
    stages: int
    goes_on_from: GoesOnFrom | None
    checkpoints: list[CheckpointRow]


class CheckpointVerdicts(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Findings of `stageline checkpoint verify`.

    Attributes:
        step: The checkpoint that was verified; None: all.
        snapshots: Snapshots, every byte of which was read.
    """

    run: str
    folder: str
    step: int | None
    snapshots: list[SnapshotState]
