"""Which snapshot a replica of a stage begins with: its own, or on a machine without that another replica's."""

from stageline.pipeline.schedule import Schedule

from .directory import SnapshotDirectory


def beginning_of(stage: int, step: int, schedule: Schedule, checkpoints: SnapshotDirectory) -> int:
    """The stage or replica whose snapshot of `step` has the state of `stage`: at the same step all replicas have the
    same. Only the first replica of the last stage needs its own, which has the losses and the evaluations."""
    if not schedule.shares or stage == schedule.stages - 1 or checkpoints.path(stage, step).exists():
        return stage
    others = (each for each in schedule.replicas.others(stage) if checkpoints.path(each, step).exists())
    return next(others, stage)
