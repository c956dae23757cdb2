"""A run within a limit of memory: what is chosen for it keeps the weights, and its workers below it."""

import json

import pytest

from stageline.pipeline.plan import read_plan
from stageline.workers.extras.preflight.memory_choice import chosen_memory
from stageline.workers.runs.folder import recorded_memory
from support.paths import ROOT
from support.workspace import Workspace

PLAN = ROOT / "benchmarks"
SETS = (
    "run.steps=2",
    "data.check=false",
    "model.options={ width = 512, layers = 2 }",
    "data.options={ width = 512, sequence = 128 }",
    "schedule.microbatches=4",
    "schedule.name=gpipe",
    "optimizer.factory=torch.optim.AdamW",
    "recovery.restarts=1",
    "recovery.snapshot_every=1",
)
LIMIT = 192 << 20  # of about 410 MiB that a worker takes without; least are 190 MiB


@pytest.mark.slow
@pytest.mark.timeout(400)  # three trials of a model of 50 MB, and two runs of it
@pytest.mark.usefixtures("one_thread")
def test_a_run_that_has_to_recompute_and_to_offload_keeps_its_weights_and_its_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(ROOT)
    from benchmarks.trainers.worker_memory import train_and_watch

    found = chosen_memory(read_plan(PLAN, sets=[*SETS, f"memory.limit={LIMIT}"]), lambda what: None)
    assert any(each.recompute != "nothing" and each.offload for each in found.stages)
    plain = train_and_watch(PLAN, SETS)
    limited = train_and_watch(PLAN, [*SETS, f"memory.limit={LIMIT}"])
    assert limited.sha256 == plain.sha256
    assert min(plain.peaks) > 1.5 * LIMIT
    assert max(limited.peaks) <= LIMIT


@pytest.mark.slow
def test_plan_train_and_resume_say_the_same(workspace: Workspace, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--set", "memory=20MiB", "--set", "run.steps=4", "--set", "recovery.snapshot_every=1")
    assert workspace.here("plan", ".", *words) == 0
    shown = capsys.readouterr().out
    assert "chosen for the limit of memory" in shown
    lines = [line.split() for line in shown.splitlines()]
    assert ["stage.1.recompute", '"nothing"', "chosen"] in lines
    assert ["memory.tight", "[0,", "1]", "chosen"] in lines
    assert "worker 1: its limit of memory is tight" in shown
    assert workspace.here("worker", ".", *words) == 78
    assert "is chosen once, by `stageline train`" in capsys.readouterr().err
    ended = workspace.command("train", ".", *words)
    assert ended.returncode == 0, ended.stderr
    assert "all stages fit their limit of memory as they are" in ended.stderr
    (run,) = workspace.runs()
    kept = json.loads((run / "plan.json").read_text())
    chosen = {"recompute": "nothing", "offload": []}
    assert [{key: kept["stage"][stage][key] for key in chosen} for stage in "01"] == [chosen, chosen]
    kept["stage"]["1"]["recompute"] = "stage"  # whatever would be chosen now
    (run / "plan.json").write_text(json.dumps(kept))
    sets = words[1::2]
    found = recorded_memory(read_plan(workspace.folder, sets=sets), run)
    assert found == {
        "stage.0.recompute": "nothing",
        "stage.0.offload": [],
        "stage.1.recompute": "stage",
        "stage.1.offload": [],
        "memory.tight": [0, 1],
    }
    for other in ("memory=21MiB", "schedule.name=gpipe"):
        assert recorded_memory(read_plan(workspace.folder, sets=[*sets, other]), run) == {}
    evaluated = workspace.command("eval", str(run))
    assert evaluated.returncode == 0, evaluated.stderr
