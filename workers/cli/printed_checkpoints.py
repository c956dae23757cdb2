"""What `stageline checkpoint ls`, `verify` and `split` print with --json."""

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


class NewStage(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A stage of the new layout, and the snapshots that it is made from.

    Attributes:
        worker: Place of its worker.
        layers: Names of its layers.
        old_stages: Stages of the run that have them.
        snapshots: Paths of their snapshots.
        absent: Those that are not on this machine.
        best_snapshots: Paths of the snapshots of the best evaluation's checkpoint.
        best_absent: Those of them that are not on this machine.
    """

    worker: int
    stage: int
    layers: list[str]
    old_stages: list[int]
    snapshots: list[str]
    absent: list[str]
    best_snapshots: list[str]
    best_absent: list[str]


class CheckpointSplit(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A checkpoint in another layout, of `stageline checkpoint split`.

    Attributes:
        step: Step of the checkpoint.
        new_run: Run that goes on from it.
        written: True if the snapshots of the new stages were written.
    """

    run: str
    step: int
    new_run: str
    written: bool
    stages: list[NewStage]
