"""One microbatch goes through all stages: what they take is measured, what cannot be trained is refused."""

from pathlib import Path

import pytest
import torch

from stageline.pipeline.errors import ModelRefused
from stageline.pipeline.plan import read_plan
from stageline.pipeline.program import Queue
from stageline.workers.extras.preflight.dry_run import Carried, TrialWatch, dry_run
from stageline.workers.extras.preflight.trial import record
from stageline.workers.extras.preflight.trial_result import StageEstimate
from stageline.workers.runtime.job import Job, prepare
from support import reference
from support.stored_models import allocated
from support.workspace import DATA, MODEL, Workspace

TIED = Path(reference.__file__).parent / "tied"


def tried(workspace: Workspace, *sets: str) -> tuple[list[StageEstimate], dict[Queue, Carried]]:
    return dry_run(prepare(read_plan(workspace.folder, sets=sets)))


def test_it_measures_what_each_stage_holds_and_what_each_queue_carries(workspace: Workspace) -> None:
    stages, messages = tried(workspace)
    assert [stage.parameters for stage in stages] == [40, 18]
    assert [stage.bytes["gradients"] for stage in stages] == [160, 72]
    assert all(stage.bytes["activations"] > 0 for stage in stages)
    assert {name.partition("-")[0] for name in messages} == {"forward", "backward"}
    assert all(message.bytes > 2 * 8 * 4 for message in messages.values())  # 2 rows of 8 float32, and a header


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
    passed_on = {key: message.passed_on for key, message in messages.items() if key.startswith("forward-")}
    assert passed_on == {"forward-1": 0, "forward-2": 2 * 20 * 4}


def test_a_bad_first_microbatch_is_refused_also_where_others_would_be_skipped(workspace: Workspace) -> None:
    workspace.write("model.py", MODEL + "\ndef loss(outputs, targets):\n    return outputs.mean() / 0\n")
    with pytest.raises(ModelRefused, match=r"a dry run of the first microbatch failed: the loss of microbatch 0 of "):
        tried(workspace, "model.loss=model.py:loss", "recovery.on_bad_microbatch=skip")


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


WRITES_TO_ITS_INPUT = """
class Doubles(nn.Module):
    def forward(self, x):
        return x.mul_(2)

def build():
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), Doubles(), nn.Linear(8, 2))
"""


@pytest.mark.parametrize("shares", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_stages_whose_weights_are_in_files_are_there_one_at_a_time(workspace: Workspace, shares: bool) -> None:
    """And give what they do when all are there. Those that share a parameter stay until they have gone backward."""
    workspace.write("model.py", MODEL + WRITES_TO_ITS_INPUT)
    folder, sets = (TIED, ()) if shares else (workspace.folder, ("optimizer.momentum=0.9", "model.cut=[2]"))
    held = prepare(read_plan(folder, sets=sets))
    file = workspace.folder / "m.pt"
    torch.save({name: value for part in held.segments for name, value in part.weights.items()}, file)
    stored = prepare(read_plan(folder, sets=[*sets, f"model.weights={file}"]))
    memory, gave = [], {id(stored): [], id(held): []}

    def watch(job: Job) -> TrialWatch:
        return TrialWatch(
            lambda what: memory.append(allocated(stored.segments)),
            lambda name, tree: gave[id(job)].extend(record(tree, name)),
        )

    assert dry_run(stored, watch(stored)) == dry_run(held, watch(held))
    assert gave[id(stored)] == gave[id(held)]
    own = [allocated([part]) for part in held.segments]
    assert set(memory) == ({0, 66, 42, 132, 174, 198} if shares else {0, *own})


def test_the_bytes_of_what_is_tapped_are_measured(workspace: Workspace) -> None:
    stages, _ = tried(workspace, 'taps.layers=["0", "2"]')
    assert [stage.tapped for stage in stages] == [2 * 8 * 4, 2 * 2 * 4]
    assert [stage.tapped for stage in tried(workspace)[0]] == [0, 0]
