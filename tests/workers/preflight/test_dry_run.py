"""One microbatch through all stages in this process: what it takes, and what cannot be trained."""

import pytest

from stageline.broker.queues.base import QueueKey
from stageline.pipeline.model.load import ModelRefused
from stageline.pipeline.plan import read_plan
from stageline.workers.preflight.dry_run import StageEstimate, dry_run
from stageline.workers.runtime.job import prepare
from support.workspace import DATA, MODEL, Workspace


def tried(workspace: Workspace, *sets: str) -> tuple[list[StageEstimate], dict[QueueKey, int]]:
    return dry_run(prepare(read_plan(workspace.folder, sets=sets)))


def test_it_measures_what_each_stage_holds_and_what_each_queue_carries(workspace: Workspace) -> None:
    stages, messages = tried(workspace)
    assert [stage.parameters for stage in stages] == [40, 18]
    assert [stage.bytes["gradients"] for stage in stages] == [160, 72]
    assert all(stage.bytes["activations"] > 0 for stage in stages)
    assert {key.flow for key in messages} == {"forward", "backward"}
    assert all(size > 2 * 8 * 4 for size in messages.values())  # 2 rows of 8 float32, and a header


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
