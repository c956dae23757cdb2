"""A run goes on beyond its planned end, to the bits of a run that was planned so long."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from stageline import Line, Loader, load_weights
from stageline.workers.runs.metrics import StepMetrics, metrics_in
from support.workspace import DATA, Workspace

SHORT = ("data.check=false", "recovery.snapshot_every=4", "optimizer.momentum=0.9")
STEP_LR = ("lr_scheduler.factory=torch.optim.lr_scheduler.StepLR", "lr_scheduler.step_size=2")
COSINE = ("lr_scheduler.factory=torch.optim.lr_scheduler.CosineAnnealingLR",)


def words(sets: tuple[str, ...]) -> list[str]:
    return [word for each in sets for word in ("--set", each)]


def trained(workspace: Workspace, *sets: str, resume: str | None = None) -> dict[str, Any]:
    again = [] if resume is None else ["--resume", *([resume] if resume else [])]
    ended = workspace.command("train", ".", "--json", *words((*SHORT, *sets)), *again)
    assert ended.returncode == 0, ended.stderr
    return {**json.loads(ended.stdout), "told": ended.stderr}


def refusal(workspace: Workspace, capsys: pytest.CaptureFixture[str], code: int, run: str, *sets: str) -> str:
    capsys.readouterr()
    assert workspace.here("train", ".", "--resume", run, *words((*SHORT, *sets))) == code
    return capsys.readouterr().err


def rates(folder: Path) -> list[tuple[int, list[float]]]:
    return [(line.step, line.learning_rates) for line in metrics_in(folder) if isinstance(line, StepMetrics)]


@pytest.mark.slow
def test_a_finished_run_goes_on_to_the_bits_of_a_run_that_was_planned_so_long(workspace: Workspace) -> None:
    evaluated = ("evaluation.every=4", "evaluation.keep_best=true")
    whole = trained(workspace, "run.steps=10", *STEP_LR, *evaluated)
    short = trained(workspace, "run.steps=6", *STEP_LR, *evaluated)
    assert short["weights_sha256"] != whole["weights_sha256"]
    longer = trained(workspace, "run.steps=10", *STEP_LR, *evaluated, resume=short["run"])
    assert longer["run"].startswith(f"{short['run']}-at6-")
    assert f"run {short['run']} goes on with more steps, as {longer['run']}" in longer["told"]
    same = ("weights_sha256", "losses", "metrics", "evaluations", "best", "steps")
    assert {name: longer[name] for name in same} == {name: whole[name] for name in same}
    folders = [workspace.folder / "runs" / each["run"] for each in (whole, longer)]
    assert rates(folders[0]) == rates(folders[1])
    again = workspace.command("train", ".", *words((*SHORT, *STEP_LR, *evaluated, "run.steps=10")), "--resume")
    assert again.returncode == 2
    assert f"run {longer['run']} has finished" in again.stderr


@pytest.mark.slow
def test_it_may_go_on_in_another_layout_at_the_same_time_and_once_more(workspace: Workspace) -> None:
    whole = trained(workspace, "run.steps=12")
    short = trained(workspace, "run.steps=5")
    longer = trained(workspace, "run.steps=9", "model.cut=[1]", resume=short["run"])
    longest = trained(workspace, "run.steps=12", resume=longer["run"])
    assert longest["weights_sha256"] == whole["weights_sha256"]
    assert longest["run"].startswith(f"{short['run']}-at9-")


@pytest.mark.slow
def test_replicas_of_a_stage_go_on_each_from_its_own_snapshot(workspace: Workspace) -> None:
    replicated = ("stage.1.replicas=2", *COSINE)
    whole = trained(workspace, "run.steps=8", *replicated, "lr_scheduler.T_max=8")
    short = trained(workspace, "run.steps=5", *replicated, "lr_scheduler.T_max=5")
    longer = trained(workspace, "run.steps=8", *replicated, "lr_scheduler.T_max=8", resume=short["run"])
    found, wanted = (rates(workspace.folder / "runs" / each["run"]) for each in (longer, whole))
    assert found[5:] == wanted[5:]
    endless = ("stage.1.replicas=2", *STEP_LR)
    whole = trained(workspace, "run.steps=8", *endless)
    short = trained(workspace, "run.steps=5", *endless)
    assert trained(workspace, "run.steps=8", *endless, resume=short["run"])["weights_sha256"] == whole["weights_sha256"]


@pytest.mark.slow
def test_rates_that_follow_evaluations_go_on(workspace: Workspace) -> None:
    """The last round of the shorter run is no round of the longer one."""
    plateau = ("lr_scheduler.factory=torch.optim.lr_scheduler.ReduceLROnPlateau", "lr_scheduler.patience=0")
    follows = (*plateau, "lr_scheduler.every=evaluation", "evaluation.every=2", "optimizer.lr=3.0")
    whole = trained(workspace, "run.steps=12", *follows)
    short = trained(workspace, "run.steps=5", *follows)
    longer = trained(workspace, "run.steps=12", *follows, resume=short["run"])
    assert longer["weights_sha256"] == whole["weights_sha256"]
    found, wanted = (rates(workspace.folder / "runs" / each["run"]) for each in (longer, whole))
    assert found == wanted
    assert len({tuple(each) for _, each in wanted}) > 1


@pytest.mark.slow
def test_a_new_schedule_has_its_own_rates_from_where_the_run_goes_on(workspace: Workspace) -> None:
    whole = trained(workspace, "run.steps=10", *COSINE, "lr_scheduler.T_max=10")
    short = trained(workspace, "run.steps=6", *COSINE, "lr_scheduler.T_max=6")
    longer = trained(workspace, "run.steps=10", *COSINE, "lr_scheduler.T_max=10", resume=short["run"])
    found, wanted = (rates(workspace.folder / "runs" / each["run"]) for each in (longer, whole))
    assert found[:6] == rates(workspace.folder / "runs" / short["run"])
    assert found[6:] == wanted[6:]


@pytest.mark.slow
def test_a_run_that_has_finished_is_refused_by_a_plan_without_more_steps_or_with_other_settings(
    workspace: Workspace, capsys: pytest.CaptureFixture[str]
) -> None:
    short = trained(workspace, "run.steps=5", *COSINE, "lr_scheduler.T_max=5")["run"]
    assert "name more steps, such as --set run.steps=10" in refusal(workspace, capsys, 2, short, "run.steps=5")
    assert "has finished" in refusal(workspace, capsys, 2, short, "run.steps=4")
    told = refusal(workspace, capsys, 78, short, "run.steps=10", *COSINE, "lr_scheduler.T_max=5")
    assert "--set lr_scheduler.T_max=800" in told
    told = refusal(workspace, capsys, 78, short, "run.steps=10", *COSINE, "lr_scheduler.T_max=10", "optimizer.lr=2.0")
    assert "optimizer.lr: 2.0 here" in told
    workspace.write("data.py", DATA.replace("manual_seed(1)", "manual_seed(2)"))
    named = (*COSINE, "lr_scheduler.T_max=10", "data.check=true")
    assert "gives other values than when the run began" in refusal(workspace, capsys, 78, short, "run.steps=10", *named)


def build() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.ReLU(), nn.Linear(8, 2))


ARGUMENTS: dict[str, Any] = {
    "loss": nn.functional.cross_entropy,
    "optimizer": partial(torch.optim.AdamW, lr=0.01),
    "microbatches": 2,
    "seed": 5,
    "settings": {"recovery.snapshot_every": 3},
}


@pytest.mark.slow
@pytest.mark.parametrize("cut", [[2], [3]])
def test_a_fit_with_more_epochs_goes_on_with_a_script_s_run_that_has_finished(
    cut: list[int], workspace: Workspace
) -> None:
    runs = workspace.folder / "runs"
    torch.manual_seed(1)
    x = torch.randn(24, 4)
    loader = Loader(TensorDataset(x, (x.sum(1) > 0).long()), batch_size=6, seed=2)
    held_out = [(x[:6], (x[:6].sum(1) > 0).long())]
    options: dict[str, Any] = {"held_out": held_out, "evaluate_every": 2}
    with Line(build, cut=[2], workers="inline", **ARGUMENTS) as line:
        whole = line.fit(loader, epochs=5, **options)
        wanted = line.state_dict()
    with Line(build, cut=[2], folder=runs, **ARGUMENTS) as line:
        line.fit(loader, epochs=2, **options)
    assert line.folder is not None
    finished = load_weights(line.folder)
    with Line.resume(line.folder, build, cut=cut, folder=runs, **ARGUMENTS) as again:
        assert again.position == 8  # the end has a checkpoint, although 8 is no multiple of 3
        fitted = again.fit(loader, epochs=5, **options)
        assert all(torch.equal(wanted[name], found) for name, found in again.state_dict().items())
    assert fitted.evaluations == whole.evaluations
    assert again.folder is not None
    assert [step for step, _ in rates(again.folder)] == list(range(20))
    kept = load_weights(line.folder)
    assert all(torch.equal(finished[name], kept[name]) for name in kept)  # nothing in its folder has changed
