"""The model of a run that is over, or that goes on: its factory, its options, its weights."""

import json
import shutil
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from stageline import Line, ModelRefused, NoSuchRun, WeightsUnusable, load, load_weights
from stageline.broker.coordinator.run import ScriptCode
from stageline.workers.disk.atomic_file import persist_json
from stageline.workers.runs.records import CODE, hashes_of
from support.workspace import MODEL, Workspace

LAYERS = """
import torch
from torch import nn
from stageline import Layer, Layers

class Net(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.first, self.act, self.last = nn.Linear(4, width), nn.ReLU(), nn.Linear(width, 2)

    def forward(self, x):
        return self.last(self.act(self.first(x)))

def build(width=8):
    net = Net(width)
    return Layers(net, [Layer("first"), Layer("act"), Layer("last")])

def listed():
    return [nn.Sequential(nn.Linear(4, 8), nn.ReLU()), nn.Linear(8, 2)]

def accuracy(outputs, targets):
    return (outputs.argmax(1) == targets).float().mean()
"""


LATE = """
from torch import nn

class LateSum(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("late", None)

    def forward(self, x):
        self.late = x.detach().sum(0)
        return x

def build():
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), LateSum(), nn.Linear(8, 2))
"""


def train(workspace: Workspace, *sets: str) -> Path:
    """The folder of a run that was trained by processes of their own: this one has not loaded the user's code."""
    before = set(workspace.runs())
    ended = workspace.command("train", ".", *(word for each in sets for word in ("--set", each)))
    assert ended.returncode == 0, ended.stderr
    (new,) = set(workspace.runs()) - before
    return new


def test_a_finished_run_is_loaded_as_its_plan_has_it_from_any_folder(workspace: Workspace) -> None:
    run = train(workspace, 'model.trainable=["2.*"]')
    before = torch.random.get_rng_state()
    model = load(run)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert isinstance(model, nn.Sequential)
    assert not any(each.training for each in model.modules())
    assert {name: each.requires_grad for name, each in model.named_parameters()} == {
        "0.weight": False,
        "0.bias": False,
        "2.weight": True,
        "2.bias": True,
    }
    trained, found = load_weights(run), model.state_dict()
    assert trained.keys() == found.keys()
    assert all(torch.equal(trained[name], found[name]) for name in trained)


@pytest.mark.slow
def test_a_run_in_the_middle_gives_its_newest_checkpoint_or_the_one_that_is_named(workspace: Workspace) -> None:
    short = load_weights(train(workspace, "run.steps=4"))
    run = train(workspace, "recovery.snapshot_every=4")
    for file in [run / "result.json", *run.glob("stage-*.safetensors"), *run.glob("checkpoints/*/step-0000000006/*")]:
        file.unlink()  # as if it were at step 5
    for folder in run.glob("checkpoints/*/step-0000000006"):
        folder.rmdir()
    assert all(torch.equal(short[name], tensor) for name, tensor in load(run).state_dict().items())
    assert all(torch.equal(short[name], tensor) for name, tensor in load(run, step=4).state_dict().items())
    with pytest.raises(WeightsUnusable, match=r"no snapshot of step 5 in .*the newest there are step 4"):
        load(run, step=5)


@pytest.mark.slow
def test_layers_and_lists_of_stages_are_loaded_as_one_module(workspace: Workspace) -> None:
    workspace.write("model.py", LAYERS)
    run = train(workspace, "model.options={width = 6}", "model.cut=['last']")
    model = load(run)
    assert type(model).__name__ == "Net"
    assert model.state_dict()["first.weight"].shape == (6, 4)
    x = torch.randn(3, 4)
    listed = load(train(workspace, "model.factory=model.py:listed", "model.cut='auto'", "model.stages=2"))
    assert isinstance(listed, nn.Sequential)
    assert listed.state_dict().keys() == {"0.0.weight", "0.0.bias", "1.weight", "1.bias"}
    assert model(x).shape == listed(x).shape == (3, 2)


@pytest.mark.slow
def test_a_buffer_that_was_registered_as_none_gets_the_tensor_that_the_run_has_for_it(workspace: Workspace) -> None:
    """The run trained and was exported, and nothing could read it: "2.late is not the model's"."""
    workspace.write("model.py", LATE)
    run = train(workspace, "model.metrics=[]")
    model, trained = load(run), load_weights(run)
    assert trained["2.late"].shape == (8,)
    assert torch.equal(model.state_dict()["2.late"], trained["2.late"])
    assert workspace.command("eval", str(run)).returncode == 0
    with pytest.raises(ModelRefused, match=r"2\.late is not the model's"):
        load(run, model=nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Identity(), nn.Linear(8, 2)))


def test_code_that_has_changed_is_refused_by_the_names_that_do_not_fit(workspace: Workspace) -> None:
    run = train(workspace)
    workspace.write("model.py", MODEL.replace("8", "9"))
    with pytest.raises(ModelRefused, match=r"0\.weight has shape \(8, 4\) there, the model wants \(9, 4\)"):
        load(run)
    shutil.move(workspace.folder / "stageline.toml", workspace.folder / "other.toml")
    with pytest.raises(ModelRefused, match=r"beside its plan, which was \., .*name the plan"):
        load(run)
    (elsewhere := workspace.folder / "elsewhere").mkdir()
    (elsewhere / "model.py").write_text(MODEL)
    assert load(run, plan=elsewhere)[0].weight.shape == (8, 4)
    with pytest.raises(ModelRefused, match=r"there is no folder .*nowhere"):
        load(run, plan=workspace.folder / "nowhere/plan.toml")


def test_what_is_no_run_or_has_no_weights_or_damaged_ones_is_refused(workspace: Workspace) -> None:
    with pytest.raises(NoSuchRun, match="none is not the folder of a run"):
        load(workspace.folder / "none")
    run = train(workspace, "recovery.snapshot_every=0")
    last = run / "stage-1.safetensors"
    content = last.read_bytes()
    last.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(WeightsUnusable, match=r"after 6 steps are damaged: their weights_sha256 is .*stage-1"):
        load(run)
    last.write_bytes(content[:-9])
    with pytest.raises(WeightsUnusable, match=r"stage-1\.safetensors cannot be read"):
        load(run)
    last.unlink()
    with pytest.raises(WeightsUnusable, match=r"has no snapshot, and not the weights of a finished run: .*stage-1"):
        load(run)


def test_a_damaged_snapshot_is_named(workspace: Workspace) -> None:
    run = train(workspace, "recovery.snapshot_every=2")
    file = next(run.glob("checkpoints/stage-0/step-0000000006/weights.safetensors"))
    content = file.read_bytes()
    file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(WeightsUnusable, match=r"stage-0/step-0000000006 cannot be used: weights"):
        load(run)


def test_the_run_of_a_script_is_loaded_into_the_module_that_is_passed(workspace: Workspace) -> None:
    def build() -> nn.Sequential:
        return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))

    sgd = partial(torch.optim.SGD, lr=0.1)
    with Line(build, cut=[2], loss=nn.functional.cross_entropy, optimizer=sgd, folder=workspace.folder) as line:
        line.step(torch.randn(6, 4), torch.tensor([0, 1] * 3))
        line.save(workspace.folder / "saved")
    assert line.folder is not None
    with pytest.raises(ModelRefused, match=r"is a script's, .* Pass the module .*load\(RUN, model=\.\.\.\); or go on"):
        load(line.folder)
    model, trained = build(), line.state_dict()
    assert load(line.folder, model=model) is model
    assert all(torch.equal(trained[name], tensor) for name, tensor in model.state_dict().items())
    saved = load(workspace.folder / "saved", model=build())
    weights = load_weights(workspace.folder / "saved")
    assert all(torch.equal(trained[name], tensor) for name, tensor in weights.items())
    assert all(torch.equal(trained[name], tensor) for name, tensor in saved.state_dict().items())
    with pytest.raises(ModelRefused, match="are not those of the model that was passed: weight is missing"):
        load(line.folder, model=nn.Linear(4, 8))


@pytest.mark.slow
def test_weights_that_a_script_sets_after_its_last_step_are_those_of_its_run(workspace: Workspace) -> None:
    """`export` wrote those of before, and `load` called them damaged."""
    sgd = partial(torch.optim.SGD, lr=0.1)

    def build() -> nn.Sequential:
        return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))

    with Line(build, cut=[2], loss=nn.functional.cross_entropy, optimizer=sgd, folder=workspace.folder) as line:
        line.step(torch.randn(6, 4), torch.tensor([0, 1] * 3))
        wanted = {name: tensor + 1 for name, tensor in line.state_dict().items()}
        line.load_state_dict(wanted)
    assert line.folder is not None
    assert workspace.here("export", str(line.folder), "end.safetensors") == 0
    exported, loaded = load_file(workspace.folder / "end.safetensors"), load(line.folder, model=build()).state_dict()
    assert all(torch.equal(wanted[name], each[name]) for each in (exported, loaded) for name in wanted)


def test_the_code_of_a_script_whose_workers_joined_by_names_must_be_that_of_the_run(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = train(workspace)
    workspace.write("joined_model.py", MODEL)
    plan = json.loads((run / "plan.json").read_text())
    plan["model"] |= {"factory": "joined_model.build", "loss": "torch.nn.functional.cross_entropy", "metrics": []}
    plan["data"]["source"] = "script:batches"
    del plan["run"]["steps"]
    (run / "plan.json").write_text(json.dumps(plan))
    for folder in run.glob("checkpoints"):
        shutil.rmtree(folder)  # they are those of the plan that it had
    persist_json(run / CODE, ScriptCode(str(torch.__version__), hashes_of(workspace.folder, ["joined_model.py"])))
    with pytest.raises(ModelRefused, match=r"code of run small-.*, joined_model\.py, is not here: go to"):
        load(run)
    monkeypatch.chdir(workspace.folder)
    assert torch.equal(load(run).state_dict()["0.bias"], load_file(run / "stage-0.safetensors")["0.bias"])
    workspace.write("joined_model.py", MODEL + "\n")
    with pytest.raises(ModelRefused, match=r"joined_model\.py in .* changed since run small-.* was begun"):
        load(run)
