"""The whole way: a process trains, writes snapshots and dies; another, which has nothing but the files, goes on."""

import os
import signal
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest
import torch
from torch.optim.lr_scheduler import MultiStepLR

from stageline.workers.checkpoint.directory import SnapshotDirectory
from stageline.workers.checkpoint.snapshot import Origin, Snapshot
from stageline.workers.disk.background_writer import BackgroundWriter
from support.fork_server import ForkServer
from support.states import difference
from support.training_stages import drive, last_stage, middle_stage, mixed, train

pytestmark = pytest.mark.usefixtures("one_thread")

ORIGIN = Origin("digits-1", "5fa0" * 16)

new_last = partial(
    last_stage,
    optimizer=partial(torch.optim.AdamW, lr=0.01),
    scheduler=partial(MultiStepLR, milestones=[2, 4], gamma=0.5),
)
new_middle = partial(middle_stage, mixed)


def synchronous() -> list[Snapshot]:
    stage = new_last()
    train(stage, range(3))
    return [Snapshot(1, 3, 1, stage.snapshot())]


def asynchronous() -> list[Snapshot]:
    return [Snapshot(1, step, 1, state) for step, state in drive(new_middle(), range(4), 2)[1].items()]


def write_and_die(folder: str, how: str) -> None:
    """Work of the process that dies."""
    torch.set_num_threads(1)
    writer = BackgroundWriter("snapshots", limit=1)
    for snapshot in {"synchronous": synchronous, "asynchronous": asynchronous}[how]():
        writer.submit(partial(SnapshotDirectory(Path(folder), ORIGIN).write, snapshot), 1, 1)
    assert writer.flush()
    os.kill(os.getpid(), signal.SIGKILL)


def die(fork_server: ForkServer, folder: Path, how: str) -> SnapshotDirectory:
    """Lets a process write these snapshots and be killed."""
    with closing(fork_server.call("integration.test_resume_from_files:write_and_die", folder, how)) as process:
        _, errors = process.communicate()
    assert process.returncode == -signal.SIGKILL, errors
    return SnapshotDirectory(folder, ORIGIN)


def test_synchronous_training_goes_on_with_the_same_bits(fork_server, tmp_path):
    undisturbed, stage = new_last(), new_last(seed=1)
    wanted = train(undisturbed, range(6))[12:]
    stage.restore(die(fork_server, tmp_path, "synchronous").load(1, 3).state)
    assert not difference(train(stage, range(3, 6)), wanted)
    assert not difference(stage.snapshot(), undisturbed.snapshot())


def test_asynchronous_training_goes_on_with_what_was_in_flight(fork_server, tmp_path):
    wanted, states = drive(new_middle(), range(6), 2)
    checkpoints = die(fork_server, tmp_path, "asynchronous")
    assert checkpoints.steps(1) == [0, 1, 2, 3, 4]
    for step in (1, 2):  # when the process came to these steps, it had two microbatches in flight, as undisturbed
        stage = new_middle(seed=1)
        stage.restore(checkpoints.load(1, step).state)
        out, after = drive(stage, range(step, 6), 2)
        assert not difference(out, {action: wanted[action] for action in out})
        assert not difference(after[6], states[6])
