"""Estimates of plans before they run."""

import errno
import os
from pathlib import Path

import pytest

from stageline.pipeline.errors import DataError
from stageline.pipeline.plan import PlanRefused, read_plan
from stageline.workers.disk import memory as mapped_files
from stageline.workers.disk.background_writer import WriteFailed
from stageline.workers.extras.preflight.trial import estimate
from support import reference
from support.workspace import Workspace

TIED = Path(reference.__file__).parent / "tied"


def test_a_plan_comes_to_stages_queues_and_idle_workers(workspace: Workspace) -> None:
    found = estimate(read_plan(workspace.folder))
    assert found.steps == 6
    assert [(stage.stage, stage.worker, stage.parameters) for stage in found.stages] == [(0, 0, 40), (1, 1, 18)]
    assert [stage.bytes["weights"] for stage in found.stages] == [160, 72]  # float32
    assert all(stage.total == sum(stage.bytes.values()) for stage in found.stages)
    assert [(queue.producer, queue.consumer) for queue in found.queues] == [(1, 0), (0, 1)]
    assert len(found.idle) == 2
    assert all(0 < idle < 1 for idle in found.idle)


def test_an_optimizer_with_state_takes_the_memory_of_its_state(workspace: Workspace) -> None:
    found = estimate(read_plan(workspace.folder, sets=["optimizer.momentum=0.9"]))
    assert [stage.bytes["optimizer"] for stage in found.stages] == [stage.bytes["gradients"] for stage in found.stages]


def test_a_stage_of_a_group_is_held_to_no_limit_since_what_its_processes_take_is_not_known(
    workspace: Workspace,
) -> None:
    small = "model.stage_memory=300B"
    with pytest.raises(PlanRefused, match=r"model\.stage_memory = 300: stage 0, of layers 0 to 1, takes"):
        estimate(read_plan(workspace.folder, sets=[small]))
    found = estimate(read_plan(workspace.folder, sets=["model.stage_memory=400B", "stage.0.shard=2"]))
    assert [each.total > 400 for each in found.stages] == [True, False]


def test_messages_without_room_in_memory_give_a_warning(workspace: Workspace) -> None:
    needed = max(queue.retained for queue in estimate(read_plan(workspace.folder)).queues)
    found = estimate(read_plan(workspace.folder, sets=[f"queues.retain_bytes={needed // 2}"]))
    assert any("the rest on disk" in warning for warning in found.warnings)


def test_messages_without_any_room_are_refused_with_the_size_that_is_enough(workspace: Workspace) -> None:
    with pytest.raises(PlanRefused, match=r"queues\.retain_bytes.*it would wait for ever\. Use \"1MiB\" or more"):
        estimate(read_plan(workspace.folder, sets=["queues.retain_bytes=100"]))


@pytest.mark.parametrize("tied", ["microbatch", "step"])
def test_what_stages_share_counts_once_and_its_gradients_are_messages(tied: str) -> None:
    """Retained are those of three steps of four microbatches: a checkpoint is complete every two."""
    found = estimate(read_plan(TIED, sets=[f"schedule.tied={tied}"]))
    assert [stage.parameters for stage in found.stages] == [66, 42, 0, 0]
    assert [stage.bytes["weights"] for stage in found.stages] == [264, 168, 264, 264]
    messages = {queue.queue: queue for queue in found.queues if queue.queue.startswith(("tied", "subtotal", "total"))}
    upward = "tied" if tied == "microbatch" else "subtotal"
    ends = {name: (queue.producer, queue.consumer) for name, queue in messages.items()}
    assert ends == {f"{upward}-0": (2, 0), f"{upward}-2": (3, 2), "total-2": (0, 2), "total-3": (2, 3)}
    assert all(264 < queue.message < 364 for queue in messages.values())
    assert messages[f"{upward}-0"].retained == messages[f"{upward}-0"].message * 3 * (4 if tied == "microbatch" else 1)


def test_the_last_batch_of_an_epoch_and_of_what_is_held_out_have_rows_that_a_traced_model_takes(
    workspace: Workspace,
) -> None:
    """Of 32 rows, and 8 held out; batches of 6 rows leave two. BatchNorm refuses to train on one row."""
    model = workspace.folder / "model.py"
    model.write_text(
        model.read_text()
        .replace("return nn.Sequential(", "return traced(nn.Sequential(nn.BatchNorm1d(4), ")
        .replace("2))", "2)), torch.ones(2, 4))")
        .replace("from torch", "import torch\nfrom stageline import traced\nfrom torch")
    )
    for steps, name in ((6, r"batch\(5\)"), (4, "the last batch of the rows held out")):
        with pytest.raises(DataError, match=rf"^{name}: the input has 1 row in a microbatch \(2 rows in 3 micro"):
            estimate(read_plan(workspace.folder, sets=[f"run.steps={steps}"]))
    assert estimate(read_plan(workspace.folder, sets=["data.batch_size=8"])).steps == 6


FROZEN = Path(reference.__file__).parent / "frozen"


def test_what_is_frozen_holds_no_gradient_and_what_runs_ahead_keeps_what_the_next_stage_grants() -> None:
    """Forwards of stages 0 and 1 may be ten messages ahead of the next: three steps of four, and of the last by one."""
    found = estimate(read_plan(FROZEN))
    assert [(stage.trained, stage.in_flight) for stage in found.stages] == [(0, 0), (0, 0), (84, 3), (0, 2), (0, 1)]
    assert [stage.bytes["gradients"] > 0 for stage in found.stages] == [False, False, True, False, False]
    assert [stage.bytes["activations"] > 0 for stage in found.stages] == [False, False, True, True, True]
    queues = {queue.queue: (queue.in_flight, queue.retained // queue.message) for queue in found.queues}
    assert queues == {
        "forward-1": (10, 4 * 8),  # of two steps to the checkpoint, one, and three twice: not more than the run has
        "forward-2": (10, 4 * 6),
        "forward-3": (3, 4 * 3),
        "forward-4": (2, 4 * 3),
        "backward-2": (3, 4 * 3),
        "backward-3": (2, 4 * 3),
    }


def test_a_backward_of_a_frozen_stage_counts_as_one_forward() -> None:
    """In units of one forward. The second stage has no parameters."""
    assert _work(["middle.*"]) == [1, 1, 3, 2, 2]
    assert _work(["*"]) == [3, 2, 3, 3, 3]


def _work(trainable: list[str]) -> list[float]:
    """Work of each worker for a microbatch, where one does three units."""
    idle = estimate(read_plan(FROZEN, sets=[f"model.trainable={trainable}"])).idle
    return [round(3 * (1 - each) / (1 - min(idle)), 3) for each in idle]


def test_what_recomputes_holds_less_and_takes_more_for_a_moment() -> None:
    plain, again = (
        estimate(read_plan(TIED.parent / "frozen", sets=["model.cut=[5]", 'model.trainable=["*"]', *sets]))
        for sets in ([], ['memory.recompute="stage"'])
    )
    for before, now in zip(plain.stages, again.stages, strict=True):
        assert now.bytes["activations"] < before.bytes["activations"]
        assert now.working > before.working


def test_a_worker_takes_its_stages_its_messages_and_a_snapshot(workspace: Workspace) -> None:
    found = estimate(read_plan(workspace.folder, sets=["optimizer.momentum=0.9"]))
    for worker, stage in zip(found.workers, found.stages, strict=True):
        assert worker.total == sum(worker.bytes.values())
        assert (worker.bytes["stages"], worker.bytes["working"]) == (stage.total, stage.working)
        held = stage.bytes
        assert worker.bytes["snapshots"] == held["weights"] + held["optimizer"]
        assert worker.bytes["messages"] > 0
    without = estimate(read_plan(workspace.folder, sets=["recovery.restarts=0"]))
    assert [worker.bytes["snapshots"] for worker in without.workers] == [0, 0]


def test_under_a_limit_a_copy_for_a_snapshot_is_not_beside_what_an_update_has_cleared(workspace: Workspace) -> None:
    found = estimate(read_plan(workspace.folder, sets=["optimizer.momentum=0.9", "memory=1GiB"]))
    for worker, stage in zip(found.workers, found.stages, strict=True):
        held = stage.bytes
        copy = held["weights"] + held["optimizer"] - held["gradients"] - held["activations"]
        assert worker.bytes["snapshots"] == 0
        assert worker.bytes["working"] == max(stage.working, copy)


def test_what_is_memory_of_files_is_not_in_the_memory_of_the_worker(workspace: Workspace) -> None:
    """Layers of 64 KiB and more; of the others, and of biases, nothing goes to files."""
    workspace.write(
        "model.py",
        "from torch import nn\n\ndef build():\n"
        "    return nn.Sequential(nn.Linear(4, 256), nn.Linear(256, 256), nn.Linear(256, 2))\n",
    )
    sets = ["model.metrics=[]", "model.cut=[1]", "optimizer.momentum=0.9"]
    plain = estimate(read_plan(workspace.folder, sets=sets))
    for wanted, tensors in (('["weights"]', 2), ('["optimizer"]', 1), ('["weights", "optimizer"]', 3)):
        found = estimate(read_plan(workspace.folder, sets=[*sets, f"memory.offload={wanted}"]))
        assert [stage.in_files for stage in found.stages] == [0, tensors * 256 * 256 * 4]
        less = [a.bytes["stages"] - b.bytes["stages"] for a, b in zip(plain.workers, found.workers, strict=True)]
        assert less == [0, tensors * 256 * 256 * 4]
        assert all(worker.bytes["snapshots"] == 0 for worker in found.workers)


def test_a_disk_without_room_ends_the_trial_at_once(workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was waited for, a minute for each attempt, and `plan` said nothing meanwhile."""
    workspace.write(
        "model.py",
        "from torch import nn\n\ndef build():\n    return nn.Sequential(nn.Linear(4, 8192), nn.Linear(8192, 2))\n",
    )
    attempts: list[int] = []

    def reserve(descriptor: int, size: int) -> None:
        attempts.append(size)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(mapped_files, "_reserve", reserve)
    monkeypatch.setattr(mapped_files, "sleep", lambda seconds: pytest.fail("waits"))
    sets = ["model.metrics=[]", "model.cut=[1]", 'memory.offload=["weights"]']
    with pytest.raises(WriteFailed, match=r"cannot make a file of \d+ bytes in .*: No space left on device"):
        estimate(read_plan(workspace.folder, sets=sets))
    assert len(attempts) == 1
