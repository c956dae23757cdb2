"""Each layer of a plan's model is measured as a stage of its own, and the model is cut by that."""

import contextlib
import json
import re
from pathlib import Path

import pytest

from stageline.pipeline.errors import ModelRefused
from stageline.pipeline.plan import Plan, PlanRefused, read_plan
from stageline.workers.extras.preflight.measure import measured_cut
from stageline.workers.extras.preflight.trial import estimate
from stageline.workers.launch import template
from stageline.workers.launch.launch import prepare_launch
from stageline.workers.runtime.job import prepare
from support.workspace import MODEL, Workspace

SLOW = """
import time

class Slow(nn.ReLU):
    def forward(self, x):
        time.sleep(0.02)
        return super().forward(x)

def slow():
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.ReLU(), nn.Linear(8, 2), Slow())
"""
CUT = ('model.cut="auto"', "model.stages=2")
TIMED = (*CUT, "model.factory=model.py:slow", "model.balance=time")


def plan(workspace: Workspace, *sets: str) -> Plan:
    return read_plan(workspace.folder, sets=sets)


def ignore(what: str) -> None:
    pass


def test_a_slow_layer_has_a_stage_of_its_own(workspace: Workspace) -> None:
    workspace.write("model.py", MODEL + SLOW)
    assert measured_cut(plan(workspace, *TIMED), ignore).cut == (4,)


def test_the_cut_with_the_least_limit_has_stages_of_that_estimate(workspace: Workspace) -> None:
    """Adam's state, gradients and activations included: what is foreseen from the layers is what a stage then takes."""
    adam = (*CUT, "optimizer.factory=torch.optim.Adam")
    with pytest.raises(ModelRefused, match="no cut into 2 stages fits") as refused:
        measured_cut(plan(workspace, *adam, "model.stage_memory=9"), ignore)
    least = next(map(int, re.findall("At least ([0-9]+) is needed", str(refused.value))))
    limited = plan(workspace, *adam, f"model.stage_memory={least}")
    found = estimate(limited.with_cut(measured_cut(limited, ignore).cut))
    assert max(stage.total for stage in found.stages) == least
    with pytest.raises(PlanRefused, match=rf"model\.stage_memory = {least - 1}: stage 0, of layers 0 to .* takes"):
        estimate(
            plan(workspace, "model.cut=[2]", "optimizer.factory=torch.optim.Adam", f"model.stage_memory={least - 1}")
        )


def test_a_process_that_did_not_begin_the_run_refuses_to_measure(workspace: Workspace) -> None:
    for sets in ((*CUT, "model.balance=time"), (*CUT, "model.stage_memory=1GiB")):
        with pytest.raises(PlanRefused, match="Run `stageline plan`, and write the cut that it shows"):
            prepare(plan(workspace, *sets))
        for command in ("worker", "broker"):
            words = [word for each in sets for word in ("--set", each)]
            assert workspace.here(command, ".", *words) == 78
    assert prepare(plan(workspace, "model.balance=time", "model.stage_memory=1GiB")).schedule.stages == 2


def cut_of(run: Path) -> object:
    return json.loads((run / "plan.json").read_text())["model"]["cut"]


@pytest.mark.slow
def test_train_measures_once_and_its_run_keeps_the_cut(
    workspace: Workspace, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whatever a measurement would say later: a run that goes on has the cut that it began with."""
    workspace.write("model.py", MODEL + SLOW)
    words = [word for each in TIMED for word in ("--set", each)]
    assert workspace.here("plan", ".", *words) == 0
    shown = capsys.readouterr().out
    assert "cut = [4] as measured now; forward and backward of a microbatch: stage 0" in shown
    assert ["model.cut", "[4]", "measured"] in [line.split() for line in shown.splitlines()]
    ended = workspace.command("train", ".", *words)
    assert ended.returncode == 0, ended.stderr
    (run,) = workspace.runs()
    assert cut_of(run) == [4]
    kept = json.loads((run / "plan.json").read_text())
    (run / "plan.json").write_text(json.dumps({**kept, "model": {**kept["model"], "cut": [3]}}))
    (run / "result.json").unlink()
    with contextlib.chdir(workspace.folder), workspace.forking(), template.Template() as processes:
        launch = prepare_launch(plan(workspace, *TIMED), [".", *words], processes, resume=run.name)
    assert (launch.run, launch.plan.model.cut, launch.decided) == (run.name, (3,), ("--set", "model.cut=[3]"))
