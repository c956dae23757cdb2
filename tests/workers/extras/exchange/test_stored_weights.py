"""Checkpoints of a run that goes on, and deletes old snapshots while they are read."""

from pathlib import Path
from shutil import rmtree

import pytest
import torch

from stageline.pipeline.stage.stage_state import StageState
from stageline.workers.checkpoint.directory import FOLDER, SnapshotDirectory
from stageline.workers.checkpoint.snapshot import Origin, Snapshot
from stageline.workers.checkpoint.source import CheckpointSource, checkpoint_rows, snapshot_states, source_in
from stageline.workers.disk.atomic_file import write_json
from stageline.workers.extras.exchange.stored_weights import RunMovedOn, StoredWeights, take_weights, weights_in
from stageline.workers.runs.folder import PLAN
from support.small_plans import plan


def write(folder: Path, step: int) -> None:
    here = SnapshotDirectory(folder / FOLDER, Origin(folder.name, plan().resolved(2).digest()))
    for stage in (0, 1):
        here.write(Snapshot(stage, step, 1, StageState({f"{stage}.weight": torch.full((2,), float(step))})))


@pytest.fixture
def source(tmp_path: Path) -> CheckpointSource:
    """Of a run with checkpoint 20, which was looked at before its snapshot of stage 1 was deleted."""
    folder = tmp_path / "small-1"
    folder.mkdir()
    write_json(folder / PLAN, plan().resolved(2).as_mapping())
    write(folder, 20)
    return source_in(folder)


def test_what_is_deleted_meanwhile_is_not_damaged(source: CheckpointSource) -> None:
    assert source.complete == [20]
    rmtree(source.snapshots.path(1, 20))
    (row,) = checkpoint_rows(source)
    assert (row.stages, row.complete, row.damages) == ((0,), False, ())
    assert [(each.stage, each.damages) for each in snapshot_states(source, None)] == [(0, ())]
    rmtree(source.snapshots.path(0, 20))
    assert checkpoint_rows(source) == []


def test_weights_that_are_deleted_meanwhile_are_those_of_the_newest_checkpoint_by_then(
    source: CheckpointSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The snapshot was called damaged, or its file unreadable."""
    verify, read, told = SnapshotDirectory.verify, [], []

    def moves_on(before: int) -> None:
        rmtree(source.snapshots.path(1, before))
        write(source.folder, before + 20)

    def verified(self: SnapshotDirectory, stage: int, step: int) -> list[str]:
        if (stage, step) == (1, 20):
            moves_on(20)
        return verify(self, stage, step)

    def use(weights: StoredWeights) -> None:
        if "after 40" in weights.title:
            moves_on(40)
        read.append(weights.read(["0.weight", "1.weight"]))

    monkeypatch.setattr(SnapshotDirectory, "verify", verified)
    assert take_weights(source.folder, None, use, told.append).title.endswith("after 60 steps")
    assert [each["1.weight"].tolist() for each in read] == [[60.0, 60.0]]
    assert [text.partition("step-")[2][:10] for text in told] == ["0000000020", "0000000040"]
    weights = weights_in(source.folder, 60)
    rmtree(source.snapshots.path(0, 60))
    with pytest.raises(RunMovedOn, match="stage-0/step-0000000060, which was being read: it has newer"):
        weights.read(["0.weight"])
