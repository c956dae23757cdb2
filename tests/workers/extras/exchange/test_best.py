"""The weights of the best evaluation: of a plan's run, of a script's, and of one that goes on in another layout."""

import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from stageline import Callback, Line, StagelineError, WeightsUnusable, load, load_weights
from support.workspace import Workspace

pytestmark = pytest.mark.slow

KEEP = ("evaluation.every=1", "evaluation.keep_best=true", "optimizer.lr=3.0", "data.check=false")


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def build() -> nn.Sequential:
    torch.manual_seed(4)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


def rows(number: int) -> list[tuple[Tensor, Tensor]]:
    torch.manual_seed(number)
    return [(x, (x.sum(1) > 0).long()) for x in torch.randn(6, 6, 4)]


class BestWeights(Callback):
    """Weights of the line at each best evaluation."""

    def __init__(self, line: Line) -> None:
        self.line = line
        self.step, self.weights = 0, {}

    def on_best(self, step: int, value: float) -> None:
        self.step, self.weights = step, self.line.state_dict()


SETTINGS: dict[str, Any] = {
    "loss": nn.functional.cross_entropy,
    "optimizer": partial(torch.optim.SGD, lr=3.0),
    "microbatches": 2,
    "settings": {"recovery.snapshot_every": 1},
}


def fitted(line: Line, best: Path | None) -> BestWeights:
    kept = BestWeights(line)
    line.fit(rows(1), epochs=1, held_out=rows(2), evaluate_every=2, callbacks=[kept], best=best)
    return kept


def test_the_best_of_a_plans_run_is_loaded_exported_evaluated_and_predicted_with(workspace: Workspace) -> None:
    ended = workspace.command("train", ".", "--json", *(word for each in KEEP for word in ("--set", each)))
    assert ended.returncode == 0, ended.stderr
    (run,) = workspace.runs()
    best = json.loads(ended.stdout)["best"]["step"]
    assert 0 < best < 6
    wanted = load(run, step=best).state_dict()
    assert not same(wanted, load_weights(run))
    assert same(load_weights(run, best=True), wanted)
    assert same(load(run, best=True).state_dict(), wanted)
    name = str(run)
    assert workspace.here("export", name, "best.safetensors", "--best") == 0
    assert same(load_file(workspace.folder / "best.safetensors"), wanted)
    measured = workspace.command("eval", name, "--best", "--json", "--workers", "inline")
    assert json.loads(measured.stdout)["step"] == best, measured.stderr
    x = torch.randn(5, 4)
    save_file({"x": x}, workspace.folder / "x.safetensors")
    files = ("--input", "x.safetensors", "--output", "y.safetensors")
    assert workspace.command("predict", name, *files, "--best", "--workers", "inline").returncode == 0
    with torch.no_grad():
        assert torch.allclose(load_file(workspace.folder / "y.safetensors")["output"], load(run, best=True)(x))
    with pytest.raises(ValueError, match="step = 3 and best = True name two checkpoints"):
        load(run, step=3, best=True)
    assert workspace.command("eval", name, "--best", "--step", "3").returncode == 2


def test_the_best_of_a_scripts_run_is_where_its_fit_keeps_it_and_goes_with_the_folder(workspace: Workspace) -> None:
    with Line(build, cut=[2], folder=workspace.folder / "runs", **SETTINGS) as line:
        kept = fitted(line, workspace.folder / "kept" / "best")
    run = line.folder
    assert run is not None
    assert kept.step < 6
    assert same(load_weights(run, best=True), kept.weights)
    assert same(load(run, model=build(), best=True).state_dict(), kept.weights)
    assert workspace.here("export", str(run), "best.safetensors", "--best") == 0
    assert same(load_file(workspace.folder / "best.safetensors"), kept.weights)
    shutil.copytree(workspace.folder, workspace.folder.with_name("copy"), symlinks=True)
    shutil.rmtree(workspace.folder / "kept")
    moved = workspace.folder.with_name("copy") / "runs" / run.name
    assert same(load_weights(moved, best=True), kept.weights)
    with pytest.raises(StagelineError, match=r"was kept at .*/kept/best, and it is not there"):
        load_weights(run, best=True)


def test_another_run_that_keeps_its_best_at_the_same_place_is_not_taken_for_this_one(workspace: Workspace) -> None:
    best, runs = workspace.folder / "best", workspace.folder / "runs"
    with Line(build, cut=[2], folder=runs, **SETTINGS) as first:
        fitted(first, best)
    with Line(build, cut=[2], folder=runs, **SETTINGS) as second:
        kept = fitted(second, best)
    assert first.folder is not None
    assert second.folder is not None
    with pytest.raises(WeightsUnusable, match=rf"that of run {second.folder.name} is there"):
        load(first.folder, model=build(), best=True)
    assert same(load_weights(second.folder, best=True), kept.weights)


def test_a_script_that_goes_on_in_another_layout_has_its_best_still(workspace: Workspace) -> None:
    best, runs = workspace.folder / "best", workspace.folder / "runs"
    line = Line(build, cut=[2], folder=runs, **SETTINGS)
    kept = fitted(line, best)
    line.__exit__(KeyError, KeyError(), None)  # as if its script ended by an error: the run can go on
    assert line.folder is not None
    with Line.resume(line.folder, build, cut=[1], folder=runs, **SETTINGS) as again:
        assert again.position == 6
    assert again.folder is not None
    assert again.folder != line.folder
    assert same(load_weights(again.folder, best=True), kept.weights)
    with Line.resume(best, build, cut=[2], folder=runs, **SETTINGS) as third:
        fitted(third, best)
    assert third.folder is not None
    assert same(load_weights(third.folder, best=True), kept.weights)


def test_a_run_that_kept_no_best_names_what_would(workspace: Workspace) -> None:
    assert workspace.here("train", ".", "--set", "queues.url=memory://") == 0
    (run,) = workspace.runs()
    with pytest.raises(StagelineError, match=r"keeps no best checkpoint: evaluation\.keep_best = true does"):
        load_weights(run, best=True)
    with Line(build, cut=[2], folder=workspace.folder / "scripts", **SETTINGS) as line:
        line.step(*rows(1)[0])
        line.save(workspace.folder / "saved")
    assert line.folder is not None
    with pytest.raises(StagelineError, match=r'keeps no best checkpoint: line\.fit\(\.\.\., best="best"\) does'):
        load_weights(line.folder, best=True)
    with pytest.raises(StagelineError, match="is one saved checkpoint: leave out --best"):
        load_weights(workspace.folder / "saved", best=True)
