"""`stageline predict` and `stageline eval`: a run's model on data, to the bit of the unsplit model."""

import json
import os
import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from stageline import load
from stageline.pipeline.tree import Tree, tensors
from support.answers import conforming
from support.workspace import DATA, MODEL, Workspace

ROWS = 17
NESTED = """
import torch
from torch import nn

class Embed(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(9, 4)

    def forward(self, x):
        return self.words(x["ids"]) * x["mask"].unsqueeze(-1), x["mask"]

class Head(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.out = nn.LayerNorm(4), nn.Linear(4, 2)

    def forward(self, x):
        hidden = self.norm(x[0].sum(1))
        return {"logits": self.out(hidden), "more": (hidden, x[1])}

def build():
    return nn.Sequential(Embed(), Head())

def loss(outputs, targets):
    return nn.functional.cross_entropy(outputs["logits"], targets)

def accuracy(outputs, targets):
    return (outputs["logits"].argmax(1) == targets).float().mean()
"""
NESTED_DATA = """
import torch
from stageline import Rows

def batches(batch_size, seed):
    generator = torch.Generator().manual_seed(1)
    x = {"ids": torch.randint(9, (32, 5), generator=generator), "mask": torch.ones(32, 5)}
    return Rows(x, x["ids"][:, 0] % 2, batch_size, seed)
"""
GATE = """
import os, signal

class Gate(nn.Module):
    def forward(self, x):
        if os.path.exists("gate"):
            with open("gate", "w") as gate:
                gate.write(str(os.getpid()))
            while True:
                signal.pause()
        return x

build_plain = build

def build():
    return nn.Sequential(*build_plain(), Gate())
"""


@pytest.fixture
def run(workspace: Workspace) -> Path:
    assert workspace.here("train", ".", "--set", "queues.url=memory://") == 0
    (folder,) = workspace.runs()
    return folder


def train(workspace: Workspace, *sets: str) -> Path:
    before = set(workspace.runs())
    ended = workspace.command("train", ".", *(word for each in sets for word in ("--set", each)))
    assert ended.returncode == 0, ended.stderr
    (new,) = set(workspace.runs()) - before
    return new


def rows(workspace: Workspace, columns: int = 4, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    x = torch.randn(ROWS, columns, generator=torch.Generator().manual_seed(7)).to(dtype)
    save_file({"x": x}, workspace.folder / "x.safetensors")
    return x


def unsplit(model: torch.nn.Module, x: Tree, size: int, microbatches: int) -> list[Tree]:
    """Outputs of the unsplit model for each microbatch of each batch of rows of a tensor, or of a dict of tensors."""
    found: list[Tree] = []
    with torch.no_grad():
        for low in range(0, ROWS, size):
            parts = [each[low : low + size].clone().tensor_split(microbatches) for each in tensors(x)]
            given = zip(*parts, strict=True)
            found += [model(dict(zip(x, each, strict=True)) if isinstance(x, dict) else each[0]) for each in given]
    return found


def files(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("size", [1, 2, 5, 6, 40])
@pytest.mark.usefixtures("one_thread")
def test_predictions_are_those_of_the_unsplit_model_for_every_batch_size(
    workspace: Workspace, run: Path, size: int
) -> None:
    """Of 17 rows; three microbatches: there are batches that do not divide, and some with fewer rows than that."""
    before, x = files(run), rows(workspace)
    how = "processes" if size == 5 else "inline"
    options = ("--input", "x.safetensors", "--output", "y.safetensors", "--batch-size", str(size), "--workers", how)
    ended = workspace.command("predict", str(run), *options)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.startswith("predictions for 17 rows by the weights of run small-")
    assert torch.equal(
        load_file(workspace.folder / "y.safetensors")["output"], torch.cat(tensors(unsplit(load(run), x, size, 3)))
    )
    assert files(run) == before
    assert workspace.runs() == [run]


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
def test_trees_go_in_by_names_and_come_out_by_dotted_names(workspace: Workspace) -> None:
    workspace.write("model.py", NESTED)
    workspace.write("data.py", NESTED_DATA)
    sets = ("--set", "model.cut=[1]", "--set", "model.loss=model.py:loss", "--set", "queues.url=memory://")
    assert workspace.here("train", ".", *sets) == 0
    (run,) = workspace.runs()
    generator = torch.Generator().manual_seed(3)
    x = {"ids": torch.randint(9, (ROWS, 5), generator=generator), "mask": torch.ones(ROWS, 5)}
    save_file(x, workspace.folder / "x.safetensors")
    ended = workspace.command("predict", str(run), "--input", "x.safetensors", "--output", "y.safetensors")
    assert ended.returncode == 0, ended.stderr
    found, wanted = load_file(workspace.folder / "y.safetensors"), unsplit(load(run), dict(x), 6, 3)
    assert found.keys() == {"logits", "more.0", "more.1"}
    for place, name in enumerate(("logits", "more.0", "more.1")):
        assert torch.equal(found[name], torch.cat([tensors(each)[place] for each in wanted]))
    save_file({"ids": x["ids"]}, workspace.folder / "less.safetensors")
    ended = workspace.command("predict", str(run), "--input", "less.safetensors", "--output", "z.safetensors")
    assert ended.returncode == 1
    assert "layer 0: " in ended.stderr  # one tensor is no dict
    assert "Layer 0 is a Embed. The batch is int64 [6, 5]" in ended.stderr
    save_file({"ids": x["ids"], "masks": x["mask"]}, workspace.folder / "other.safetensors")
    ended = workspace.command("predict", str(run), "--input", "other.safetensors", "--output", "z.safetensors")
    assert "KeyError: 'mask'" in ended.stderr
    assert "The batch is {ids: int64 [6, 5], masks: float32 [6, 5]}" in ended.stderr
    assert not (workspace.folder / "z.safetensors").exists()


@pytest.mark.parametrize("how", [pytest.param("processes", marks=pytest.mark.slow), "inline"])
def test_columns_or_numbers_that_do_not_fit_are_named_with_the_layer_and_no_file_is_written(
    workspace: Workspace, run: Path, how: str
) -> None:
    options = ("--input", "x.safetensors", "--output", "y.safetensors", "--workers", how)
    rows(workspace, columns=5)
    ended = workspace.command("predict", str(run), *options)
    assert ended.returncode == 1
    assert (
        "shapes cannot be multiplied (2x5 and 4x8). It was given float32 [2, 5]. Layer 0 is Linear(in_features=4, out"
        in ended.stderr
    )
    assert ended.stderr.endswith("The batch is float32 [6, 5] [SL508]\n")
    rows(workspace, dtype=torch.float64)
    ended = workspace.command("predict", str(run), *options)
    assert ended.returncode == 1
    assert "must have the same dtype" in ended.stderr
    assert "The batch is float64 [6, 4]" in ended.stderr
    assert not (workspace.folder / "y.safetensors").exists()


def test_what_cannot_be_predicted_is_refused_before_anything_starts(workspace: Workspace, run: Path) -> None:
    rows(workspace)
    for options, code, reason in [
        (("--input", "none.npy", "--output", "y.npy"), 78, "there is no file none.npy"),
        (("--input", "x.safetensors", "--output", "y.pt"), 78, "y.pt: expected a file of .safetensors, .npy, .csv"),
        (("--input", "x.safetensors", "--output", "x.safetensors"), 2, "x.safetensors is there already"),
        (("--input", "x.safetensors", "--output", "y.npy", "--step", "4"), 2, "holds no snapshot"),
        (
            ("--input", "x.safetensors", "--output", "y.npy", "--device", "meta"),
            78,
            'device = "meta": its tensors have no',
        ),
    ]:
        ended = workspace.command("predict", str(run), *options)
        assert (ended.returncode, ended.stdout) == (code, "")
        assert reason in ended.stderr
    ended = workspace.command("predict", "none", "--input", "x.safetensors", "--output", "y.npy")
    assert ended.returncode == 2
    assert "none is not the folder of a run" in ended.stderr
    plan = json.loads((run / "plan.json").read_text())
    plan["model"]["factory"] = "script:model"
    (run / "plan.json").write_text(json.dumps(plan))
    ended = workspace.command("predict", str(run), "--input", "x.safetensors", "--output", "y.npy")
    assert ended.returncode == 78
    assert "go on with the run by Line.resume, and call line.predict" in ended.stderr


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
def test_a_worker_that_is_killed_while_it_predicts_is_replaced(workspace: Workspace) -> None:
    workspace.write("model.py", MODEL + GATE)
    run = train(workspace)
    x = rows(workspace)
    os.mkfifo(workspace.folder / "gate")
    predict = workspace.start("predict", str(run), "--input", "x.safetensors", "--output", "y.safetensors")
    pid = int((workspace.folder / "gate").read_text())
    (workspace.folder / "gate").unlink()
    assert pid == workspace.worker(1)
    os.kill(pid, signal.SIGKILL)
    _, told = predict.communicate()
    assert predict.wait() == 0, told
    found = load_file(workspace.folder / "y.safetensors")["output"]
    assert torch.equal(found, torch.cat(tensors(unsplit(load(run), x, 6, 3))))


@pytest.mark.slow
def test_ctrl_c_ends_all_processes_and_leaves_no_file(workspace: Workspace) -> None:
    workspace.write("model.py", MODEL + GATE)
    run = train(workspace)
    rows(workspace)
    os.mkfifo(workspace.folder / "gate")
    predict = workspace.start("predict", str(run), "--input", "x.safetensors", "--output", "y.safetensors")
    (workspace.folder / "gate").read_text()
    predict.send_signal(signal.SIGINT)
    predict.communicate()
    assert predict.wait() == 130
    assert not workspace.processes()
    assert {path.name for path in workspace.folder.iterdir()}.isdisjoint({"y.safetensors", ".y.safetensors"})


@pytest.mark.slow
def test_an_evaluation_gives_the_metrics_that_the_run_ended_with(workspace: Workspace, run: Path) -> None:
    before = files(run)
    ended = workspace.command("eval", str(run), "--json")
    assert ended.returncode == 0, ended.stderr
    found, result = conforming(ended.stdout), json.loads((run / "result.json").read_text())
    assert found["metrics"] == result["metrics"]
    assert (found["schema"], found["run"], found["step"], found["rows"]) == ("eval/1", run.name, 6, 8)
    assert found["data"] == 'data.source = "data.py:batches"'
    table = workspace.command("eval", str(run), "--workers", "inline")
    assert table.stdout.splitlines()[1:] == ["rows     loss  accuracy", f"   8  {found['loss']:.6g}     0.625"]
    assert files(run) == before


OTHERS = (
    DATA
    + """
test = [(torch.full((4,), float(n)), n % 2) for n in range(5)]

def others(batch_size, seed):
    return Rows(*batches(batch_size, seed).held_out(), batch_size, seed)
"""
)


def test_other_data_and_metrics_are_named_as_in_a_plan(workspace: Workspace, run: Path) -> None:
    workspace.write("data.py", OTHERS)
    workspace.write("metrics.py", "def known(outputs, targets):\n    return 1.0 * (targets >= 0).float().mean()\n")
    how = ("--workers", "inline", "--json")
    options = ("--data", "data.py:test", "--metrics", "metrics.py:known", "--metrics", "model.py:accuracy")
    ended = workspace.command("eval", str(run), *options, *how, "--batch-size", "2")
    assert ended.returncode == 0, ended.stderr
    found = conforming(ended.stdout)
    assert found["data"] == 'data.dataset = "data.py:test"'
    assert (found["rows"], found["metrics"]["known"]) == (5, 1.0)
    x = torch.stack([torch.full((4,), float(n)) for n in range(5)])
    with torch.no_grad():
        right = (load(run)(x).argmax(1) == torch.arange(5) % 2).float().mean()
    assert found["metrics"]["accuracy"] == pytest.approx(float(right))
    for options, code, reason in [
        (("--source", "data.py:others"), 78, 'data.source = "data.py:others" holds no rows out'),
        (("--data", "data.py:none"), 78, "data.py has no 'none'"),
        (("--metrics", "model.py:none"), 78, "model.py has no 'none'"),
        (("--data", "data.py:test", "--source", "data.py:others"), 2, "leave one out"),
    ]:
        ended = workspace.command("eval", str(run), *options, *how)
        assert ended.returncode == code
        assert reason in ended.stderr
        assert conforming(ended.stdout)["schema"] == "error/1"
