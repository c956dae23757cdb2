"""Bandwidth that copies of snapshots may take, and what goes before them."""

from pathlib import Path

import pytest
import torch

from stageline.broker.codec.message import Message
from stageline.broker.control.checkpoints import Copying, CopyOrder, CopyState
from stageline.broker.queues.memory import MemoryQueues
from stageline.pipeline.program import CHUNKS, Program, SnapshotCopies, compile_program, neighbours_of
from stageline.pipeline.schedule import make_schedule
from stageline.pipeline.stage.stage_state import StageState
from stageline.workers.checkpoint.copier import Bandwidth
from stageline.workers.checkpoint.copies import LEAST, DiskCopies
from stageline.workers.checkpoint.directory import SnapshotDirectory, SnapshotFailed
from stageline.workers.checkpoint.snapshot import Origin, Snapshot
from stageline.workers.runtime.copy_progress import CopyProgress
from support.copies import copier_of
from support.workspace import wait_for

ORIGIN = Origin("run", "d" * 64)


@pytest.fixture
def program() -> Program:
    schedule = make_schedule("1f1b", ((0,), (1,)), 2)
    return compile_program(schedule, [SnapshotCopies(neighbours_of(2, [range(2)]))])


@pytest.fixture
def store(tmp_path: Path) -> DiskCopies:
    directory = SnapshotDirectory(tmp_path, ORIGIN)
    weights = {"a": torch.zeros(LEAST)}
    directory.write(Snapshot(0, 40, 7, StageState(weights, optimizer={"state": {}, "param_groups": []})))
    return DiskCopies(directory)


class PumpedQueues(MemoryQueues):
    """Of one process: what is put can be taken, and an end counts as the other one's as well."""

    def connect(self, peers: object) -> None:
        return


def chunks(queues: MemoryQueues, program: Program) -> int:
    return len(queues.outbound(program.queues["copies-0-1"]).held)


def test_a_limit_holds_over_time_and_lets_little_of_what_was_not_used_pass_at_once() -> None:
    now = [50.0]
    bandwidth = Bandwidth(100.0, lambda: now[0])
    sent = []
    for _ in range(20):
        sent.append(0)
        while bandwidth.is_free:
            bandwidth.use(5)
            sent[-1] += 5
        now[0] += 0.5
    assert sent[0] <= 110
    assert all(45 <= each <= 55 for each in sent[1:])


def test_a_snapshot_that_is_not_here_is_said_to_be_lacking(program: Program, store: DiskCopies) -> None:
    progress = CopyProgress()
    copier = copier_of(program, PumpedQueues("run"), store=store, progress=progress)
    copier.order(Copying((CopyOrder(7, 0, 60, "copies-0-1"),)))
    assert progress.states == {7: CopyState.LACKING}
    assert not copier.is_active


def test_a_chunk_waits_for_activations_unless_it_is_for_a_worker_that_is_being_restored(
    program: Program, store: DiskCopies
) -> None:
    queues = PumpedQueues("run")
    queues.outbound(program.queues["forward-1"]).put(Message("run", "forward-1", 0, 1, torch.zeros(2)))
    copier = copier_of(program, queues, store=store)
    copier.order(Copying((CopyOrder(7, 0, 40, "copies-0-1"),)))
    copier.turn()
    assert chunks(queues, program) == 0
    queues.inbound(program.queues["forward-1"]).take(0)
    queues.inbound(program.queues["copies-0-1"]).rewind(7 * CHUNKS)
    copier.turn()
    assert chunks(queues, program) > 0


def test_a_transfer_that_was_given_up_is_not_begun_again_by_an_older_message(
    program: Program, store: DiskCopies
) -> None:
    progress = CopyProgress()
    copier = copier_of(program, PumpedQueues("run"), store=store, progress=progress)
    orders = Copying((CopyOrder(7, 0, 40, "copies-0-1"),))
    copier.order(orders), copier.order(Copying())
    assert progress.states == {}
    copier.order(orders)
    assert progress.states == {7: CopyState.SPENT}


def test_a_holder_that_cannot_write_fails_though_no_other_chunk_comes(
    program: Program, store: DiskCopies, tmp_path: Path
) -> None:
    """The failure was looked at when a chunk was taken alone, and none was taken any more."""
    (tmp_path / "holder").mkdir()
    (tmp_path / "holder" / "stage-0").write_text("no folder")
    queues, sent = PumpedQueues("run"), store.parts(0, 40)
    assert sent is not None
    with DiskCopies(SnapshotDirectory(tmp_path / "holder", ORIGIN)) as holder:
        copier = copier_of(program, queues, 1, store=holder)
        copier.order(Copying((CopyOrder(7, 0, 40, "copies-0-1"),)))
        queues.outbound(program.queues["copies-0-1"]).put(Message("run", "copies-0-1", 7 * CHUNKS, 1, sent.part(0)))
        with pytest.raises(SnapshotFailed, match="stage 0"):
            wait_for(lambda: not copier.turn())
