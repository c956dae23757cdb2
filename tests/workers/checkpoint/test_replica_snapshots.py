"""A replica begins with its own snapshot, or on a machine without it with that of another replica."""

from pathlib import Path

import pytest

from stageline.pipeline.schedule import Schedule, make_schedule
from stageline.workers.checkpoint.directory import SnapshotDirectory, beginning_of
from stageline.workers.checkpoint.snapshot import Origin


def line(*shares: tuple[int, ...]) -> Schedule:
    copies = [(copy,) for copy in range(sum(map(len, shares)))]
    return make_schedule("1f1b", copies, 6, shares=shares if len(copies) > len(shares) else ())


@pytest.mark.parametrize(
    ("there", "stage", "begins_with"),
    [
        ((1, 3), 3, 3),  # its own
        ((1,), 3, 1),
        ((4,), 1, 4),
        ((2,), 3, 3),  # none: loading says so
        ((5,), 2, 2),  # the first of the last stage has the losses
        ((2,), 5, 2),
    ],
)
def test_which_snapshot_a_replica_begins_with(
    there: tuple[int, ...], stage: int, begins_with: int, tmp_path: Path
) -> None:
    checkpoints = SnapshotDirectory(tmp_path, Origin("run", "plan"))
    for each in there:
        checkpoints.path(each, 4).mkdir(parents=True)
    assert beginning_of(stage, 4, line((1,), (1, 1, 1), (1, 1)), checkpoints) == begins_with


def test_a_stage_without_replicas_begins_with_its_own(tmp_path: Path) -> None:
    checkpoints = SnapshotDirectory(tmp_path, Origin("run", "plan"))
    assert [beginning_of(stage, 4, line((1,), (1,)), checkpoints) for stage in (0, 1)] == [0, 1]
