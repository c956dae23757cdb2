"""What a plan comes to before it runs, by one microbatch through all stages; and what cannot be trained."""

from pathlib import Path

import pytest

from stageline.broker.queues.base import QueueKey
from stageline.pipeline.errors import ModelRefused
from stageline.pipeline.plan import PlanRefused, read_plan
from stageline.workers.preflight.estimate import Carried, StageEstimate, dry_run, estimate
from stageline.workers.runtime.job import prepare
from support import reference
from support.workspace import DATA, MODEL, Workspace

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


def test_messages_without_room_in_memory_give_a_warning(workspace: Workspace) -> None:
    needed = max(queue.retained for queue in estimate(read_plan(workspace.folder)).queues)
    found = estimate(read_plan(workspace.folder, sets=[f"queues.retain_bytes={needed // 2}"]))
    assert any("the rest on disk" in warning for warning in found.warnings)


def test_messages_without_any_room_are_refused_with_the_size_that_is_enough(workspace: Workspace) -> None:
    with pytest.raises(PlanRefused, match=r"queues\.retain_bytes.*it would wait for ever\. Use \"1MiB\" or more"):
        estimate(read_plan(workspace.folder, sets=["queues.retain_bytes=100"]))


def tried(workspace: Workspace, *sets: str) -> tuple[list[StageEstimate], dict[QueueKey, Carried]]:
    return dry_run(prepare(read_plan(workspace.folder, sets=sets)))


def test_it_measures_what_each_stage_holds_and_what_each_queue_carries(workspace: Workspace) -> None:
    stages, messages = tried(workspace)
    assert [stage.parameters for stage in stages] == [40, 18]
    assert [stage.bytes["gradients"] for stage in stages] == [160, 72]
    assert all(stage.bytes["activations"] > 0 for stage in stages)
    assert {key.flow for key in messages} == {"forward", "backward"}
    assert all(message.bytes > 2 * 8 * 4 for message in messages.values())  # 2 rows of 8 float32, and a header


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


SKIP = """
import torch
from torch import nn
from stageline import Layer, Layers

def build():
    parts = {"a": nn.Linear(4, 3), "b": nn.Linear(3, 3), "c": nn.ReLU(inplace=True), "d": nn.Linear(6, 2)}
    model = nn.ModuleDict(parts)
    return Layers(model, [
        Layer("a", lambda x, a: (a(x), x.repeat(1, 5))),
        Layer(("b", "c"), lambda x, b, c: (c(x[0]), b(x[0]), x[1])),
        Layer("d", lambda x, d: d(torch.cat(x[:2], 1) + x[2][:, :6])),
    ])
"""


def test_what_a_stage_only_passes_on_is_counted(workspace: Workspace) -> None:
    """But not what it changes in place."""
    workspace.write("model.py", MODEL + SKIP)
    _, messages = tried(workspace, "model.cut=[1,2]")
    passed_on = {str(key): message.passed_on for key, message in messages.items() if key.flow == "forward"}
    assert passed_on == {"forward-1": 0, "forward-2": 2 * 20 * 4}


def test_a_model_whose_loss_has_no_gradient_is_refused(workspace: Workspace) -> None:
    workspace.write("model.py", MODEL + "\ndef loss(outputs, targets):\n    return outputs.detach().mean()\n")
    with pytest.raises(ModelRefused, match="the loss has no gradient, so nothing would be trained"):
        tried(workspace, "model.loss=model.py:loss")


def test_a_model_that_raises_is_refused_with_its_error(workspace: Workspace) -> None:
    workspace.write("data.py", DATA.replace("randn(40, 4", "randn(40, 5"))
    with pytest.raises(ModelRefused, match="a dry run of the first microbatch failed"):
        tried(workspace)


def test_a_metric_that_raises_is_found_before_the_run(workspace: Workspace) -> None:
    workspace.write("model.py", MODEL.replace("outputs.argmax(1)", "outputs.no_such_method()"))
    with pytest.raises(ModelRefused, match="no_such_method"):
        tried(workspace)


def test_a_device_that_is_not_there_is_refused_by_the_key_that_names_it(workspace: Workspace) -> None:
    with pytest.raises(ModelRefused, match=r'workers\.0\.device = "cuda:99" cannot be used here'):
        tried(workspace, "workers.0.stages=[0]", "workers.0.device=cuda:99", "workers.1.stages=[1]")
