"""Which batches a run was trained on, for the script that resumes it."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from stageline.broker.codec.message import Message
from stageline.broker.queues.log import Log, RetentionBudget
from stageline.pipeline.errors import DataError
from stageline.pipeline.tree import Tree
from stageline.workers.script.calls import batch_record
from stageline.workers.script.calls.batch_record import NAME, BatchRecord, keep_batches
from support.queue_pair import queue_of


def batch(step: int) -> tuple[Tree, Tensor]:
    return {"ids": torch.full((4, 3), float(step)), "mask": torch.ones(4)}, torch.arange(4)


def sums(step: int) -> tuple[int, ...]:
    """As the queue of calls has them."""
    log = Log("run", queue_of("call-0", count=1), RetentionBudget())
    log.put(Message("run", "call-0", 0, 1, ("train", *batch(step))), now=0.0)
    return log.checksums(0)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Of a run that was killed after it had called for step 4; checkpoint 2 is complete."""
    record = BatchRecord(tmp_path, 0, compares=True)
    for step in range(5):
        record.note(step, sums(step))
    record.trim(2)
    with (tmp_path / NAME).open("ab") as file:
        file.write(b"[5, 12")
    return tmp_path


def test_the_same_batches_go_on(folder: Path) -> None:
    record = BatchRecord(folder, 2, compares=True)
    for step in range(2, 9):
        record.check(step, *batch(step))


def test_other_rows_are_refused_with_their_step_their_tensor_and_the_way_out(folder: Path) -> None:
    record = BatchRecord(folder, 2, compares=True)
    with pytest.raises(DataError, match=r"batch of step 3 .*: inputs\['ids'\] differ. Begin the loader at line.pos"):
        record.check(3, *batch(0))
    with pytest.raises(DataError, match="it has 2 tensors, and had 3"):
        record.check(3, *(part for part in batch(3) if isinstance(part, Tensor)), torch.ones(4))
    BatchRecord(folder, 2, compares=False).check(3, *batch(0))


def test_what_no_checkpoint_can_go_back_to_is_forgotten(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_record, "SPARE", -9)
    record = BatchRecord(folder, 2, compares=True)
    for complete in (4, 6, 6):
        record.trim(complete)
    assert {int(line.split(b",")[0][1:]) for line in (folder / NAME).read_bytes().splitlines()} == {4}


def test_what_a_fit_passes_over_is_compared_with_what_its_own_steps_were_trained_on(folder: Path) -> None:
    before = BatchRecord(folder, 2, compares=True)
    assert before.of_fit(1, 2) is None  # it has trained no step
    for step in range(2, 5):
        before.note(step, sums(step))
    assert before.of_fit(2, 5) is None

    resumed = BatchRecord(folder, 5, compares=True)
    differs = resumed.of_fit(1, 5)
    assert differs is not None
    assert [differs(step, *batch(step)) for step in range(5)] == [""] * 5
    assert "inputs['ids']" in differs(4, *batch(3))
    assert differs(1, *batch(3)) == ""  # before the fit
    assert resumed.of_fit(2, 5) is None
    assert BatchRecord(folder, 5, compares=False).of_fit(1, 5) is None


def test_a_copy_of_the_record_ends_where_its_checkpoint_is(
    folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    BatchRecord(folder, 0, compares=True).of_fit(1, 0)
    copy = tmp_path_factory.mktemp("saved")
    keep_batches(folder, 4, copy)
    record = BatchRecord(copy, 4, compares=True)
    record.check(4, *batch(0))
    differs = record.of_fit(1, 4)
    assert differs is not None
    assert differs(3, *batch(0))
