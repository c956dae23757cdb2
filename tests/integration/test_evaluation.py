"""Evaluation every so many steps finds what a plain loop over the unsplit model finds, to the bit, whatever dies."""

import io
import json
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from stageline.pipeline.errors import ModelRefused
from stageline.pipeline.plan import PlanRefused, read_plan
from stageline.workers.checkpoint.source import checkpoint_rows, source_in
from stageline.workers.cli.app import run
from stageline.workers.process.in_process import run_memory
from stageline.workers.runtime.job import prepare
from support.evaluated_loop import EVERY, FOLDER, STEPS, EvaluatedLoop, evaluated_loop
from support.fork_server import ForkServer
from support.plain_loop import differing
from support.workspace import Workspace

PLAN = FOLDER / "stageline.toml"
LAYOUTS = {
    "gpipe": ("schedule.name=gpipe",),
    "1f1b": (),
    "eager-1f1b": ("schedule.name=eager-1f1b",),
    "interleaved-1f1b": ("schedule.name=interleaved-1f1b", "model.cut=[1, 2, 4]", *(
        f"workers.{index}.stages=[{index}, {index + 2}]" for index in range(2)
    )),
    "v": ("workers.0.stages=[0, 2]", "workers.1.stages=[1]"),
    "one worker": ("workers.0.stages=[0, 1, 2]",),
}  # fmt: skip

pytestmark = pytest.mark.usefixtures("one_thread")


def in_memory(folder: Path, *sets: str) -> dict[str, Any]:
    """The broker's status of a run in this process."""
    plan = read_plan(FOLDER, sets=["queues.url=memory://", f"run.dir={folder}", *sets], environment={})
    outcome = run_memory(prepare(plan), "run", folder / "run")
    assert outcome.code == 0, outcome.reason
    return outcome.facts


def check(facts: dict[str, Any], plain: EvaluatedLoop) -> None:
    assert facts["evaluations"] == plain.rounds
    assert facts["last_evaluation"] == plain.rounds[-1]
    assert facts["metrics"] == plain.rounds[-1]["metrics"]
    assert list(facts["losses"].values()) == plain.losses
    assert facts["weights_sha256"] == plain.weights_sha256
    assert facts["training_steps"] == plain.steps
    assert facts["oddities"] == {}


def test_the_plain_loop_has_a_best_round_in_the_middle():
    """Else the tests below would show little."""
    losses = evaluated_loop()
    assert [each["step"] for each in losses.rounds] == [3, 6, 9, 12, 15, 18, 20]
    assert 3 < losses.best < 18
    assert len({json.dumps(each["metrics"]) for each in losses.rounds}) == 7


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_round_finds_what_the_plain_loop_finds(layout: str, tmp_path: Path):
    facts = in_memory(tmp_path, *LAYOUTS[layout])
    check(facts, evaluated_loop())
    assert facts["best"]["step"] == evaluated_loop().best


@pytest.mark.parametrize("metric", ["accuracy", "highest"])
def test_the_best_round_is_that_of_the_metric_that_the_plan_names(metric: str, tmp_path: Path):
    facts = in_memory(tmp_path, f"evaluation.metric={metric}", "evaluation.better=higher")
    check(facts, evaluated_loop())
    plain = evaluated_loop(metric, "higher")
    value = next(each["metrics"][metric] for each in plain.rounds if each["step"] == plain.best)
    assert facts["best"] == {"step": plain.best, "metric": metric, "value": value, "since": facts["best"]["since"]}


def test_without_every_there_is_one_round_after_the_last_step(tmp_path: Path):
    facts = in_memory(tmp_path, "evaluation={}")
    check(facts, evaluated_loop(every=None))
    assert facts["best"]["step"] == STEPS


def test_an_epoch_is_as_many_steps_as_the_source_has_batches(tmp_path: Path):
    facts = in_memory(tmp_path, "evaluation.every=epoch")
    check(facts, evaluated_loop(every=6))


def test_a_metric_that_is_no_number_is_told_and_ends_nothing(tmp_path: Path):
    metrics = 'model.metrics=["model.py:late", "model.py:never"]'
    facts = in_memory(tmp_path, metrics, "evaluation.metric=late", "evaluation.better=lower")
    plain = evaluated_loop("late", metrics=("late", "never"))
    check(facts, plain)
    assert facts["evaluations"][0]["metrics"] == {"late": "nan", "never": "nan"}
    assert facts["best"]["step"] == plain.best


PLATEAU = (
    "lr_scheduler.factory=torch.optim.lr_scheduler.ReduceLROnPlateau",
    "lr_scheduler.factor=0.5",
    "lr_scheduler.patience=0",
    "lr_scheduler.every=evaluation",
)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_learning_rates_may_follow_what_the_rounds_find(layout: str, tmp_path: Path):
    facts = in_memory(tmp_path, *LAYOUTS[layout], *PLATEAU)
    check(facts, evaluated_loop(plateau=True))
    assert evaluated_loop(plateau=True).losses != evaluated_loop().losses


def test_a_run_whose_rates_follow_evaluations_may_also_end_early(tmp_path: Path):
    facts = in_memory(tmp_path, *PLATEAU, "evaluation.patience=1")
    plain = evaluated_loop(patience=1, plateau=True)
    check(facts, plain)
    assert plain.steps < STEPS


@pytest.mark.slow
@pytest.mark.parametrize("kills", [[("worker-0", 5 * 10)], [("worker-1", 5 * 8), ("worker-2", 5 * 13)]])
def test_a_replaced_worker_has_the_rates_that_followed_the_rounds(
    kills: list[tuple[str, int]], fork_server: ForkServer, tmp_path: Path
):
    sets = (*PLATEAU, f"run.dir={tmp_path}")
    outcome = fork_server.train(PLAN, *sets, folder=tmp_path / "run", kills=kills)
    assert outcome["code"] == 0, outcome["reason"]
    assert outcome["not killed"] == []
    assert outcome["facts"]["weights_sha256"] == evaluated_loop(plateau=True).weights_sha256


@pytest.mark.slow
def test_all_processes_of_a_stage_have_the_rates_that_follow_the_rounds(fork_server: ForkServer, tmp_path: Path):
    """Their leader alone is told what a round has found."""
    sets = (*PLATEAU, "stage.1.shard=2", f"run.dir={tmp_path}")
    outcome = fork_server.train(PLAN, *sets, folder=tmp_path / "run")
    assert outcome["code"] == 0, outcome["reason"]
    assert outcome["facts"]["weights_sha256"] == evaluated_loop(plateau=True).weights_sha256


REFUSED = {
    "evaluation={patience=3}": r"evaluation.patience = 3: it requires several evaluations: add evaluation.every = 100",
    "evaluation.patience=0": r"evaluation.patience = 0: expected a whole number of at least 1",
    "evaluation={keep_best=true}": r"evaluation.keep_best = true: it requires several evaluations: add evaluation",
    "recovery.restarts=0": r"evaluation.keep_best = true: no checkpoints are written: use recovery.restarts = 5 and",
    "queues.url=memory://": r'keep_best = true: with queues.url = "memory://" no checkpoints are written: use another',
    "evaluation.metric=acuracy": r"evaluation.metric = \"acuracy\": it is not a metric of the run; use 'loss' or 'acc",
    "evaluation.metric=accuracy": r'evaluation.better: set which accuracy is better: better = "higher"',
    "evaluation.every=0": r'evaluation.every = 0: expected "epoch" or a number of steps of at least 1',
    "evaluation.evry=3": r'evaluation.evry: there is no such key; did you mean "every"',
    "schedule.mode=async": r'evaluation.every = 3: mode = "async" does not support it',
}


@pytest.mark.parametrize("change", REFUSED)
def test_a_plan_that_cannot_evaluate_is_refused(change: str):
    more = ("schedule.microbatches=1",) if "async" in change else ("evaluation.keep_best=true",)
    more = () if "evaluation={" in change or "patience" in change else more
    with pytest.raises(PlanRefused, match=REFUSED[change]):
        read_plan(FOLDER, sets=[change, *more], environment={})


def test_rates_cannot_follow_evaluations_that_are_not_there():
    with pytest.raises(PlanRefused, match=r'lr_scheduler.every = "evaluation": it requires evaluations between'):
        read_plan(FOLDER, sets=[*PLATEAU, "evaluation={}"], environment={})


def test_a_scheduler_that_steps_by_a_value_has_to_follow_evaluations(tmp_path: Path):
    with pytest.raises(ModelRefused, match=r'ReduceLROnPlateau steps by .* use lr_scheduler.every = "evaluation"'):
        in_memory(tmp_path, *PLATEAU[:3])


def test_a_source_that_holds_nothing_back_is_refused(workspace: Workspace):
    workspace.write("data.py", (workspace.folder / "data.py").read_text().replace("held_out=(x[32:], y[32:])", ""))
    plan = read_plan(workspace.folder, sets=["evaluation.every=3"], environment={})
    with pytest.raises(PlanRefused, match=r"evaluation.every = 3: there are no rows to evaluate: what data.source = "):
        prepare(plan)


# Of each worker, actions up to the middle of the second round: 6 steps of 5, one round of 4, and half a round.
MIDDLE = 6 * 5 + 4 + 2
LAST_OF_ROUND = 6 * 5 + 4 + 4


@pytest.mark.parametrize(
    "kills",
    [
        pytest.param((("worker-1", MIDDLE), ("broker", 30)), marks=pytest.mark.slow),
        pytest.param((("worker-2", MIDDLE),), marks=pytest.mark.slow),
        pytest.param((("worker-2", LAST_OF_ROUND),), marks=pytest.mark.slow),
        pytest.param((("worker-0", MIDDLE), ("worker-1", MIDDLE), ("worker-2", MIDDLE)), marks=pytest.mark.slow),
        pytest.param((("worker-0", LAST_OF_ROUND), ("worker-0", 9)), marks=pytest.mark.slow),
    ],
    ids=["middle", "last middle", "round has ended", "all", "again"],
)
def test_processes_are_killed_in_a_round_of_evaluation(kills: Any, fork_server: ForkServer, tmp_path: Path):
    outcome = fork_server.train(PLAN, f"run.dir={tmp_path}", folder=tmp_path / "run", kills=kills)
    assert outcome["code"] == 0, outcome["reason"]
    assert outcome["not killed"] == outcome["orphans"] == outcome["left"] == []
    check(outcome["facts"], evaluated_loop())
    assert outcome["facts"]["best"]["step"] == evaluated_loop().best


def test_the_result_and_the_status_have_every_round(workspace: Workspace, capsys: pytest.CaptureFixture[str]):
    assert workspace.here("train", str(PLAN), "--json", "--set", "queues.url=memory://") == 0
    result, plain = json.loads(capsys.readouterr().out), evaluated_loop()
    assert (result["evaluations"], result["metrics"]) == (plain.rounds, plain.rounds[-1]["metrics"])
    assert result["best"]["step"] == plain.best
    assert workspace.here("status", "--json", str(workspace.runs()[0])) == 0
    assert json.loads(capsys.readouterr().out)["evaluations"] == plain.rounds
    assert workspace.here("status", str(workspace.runs()[0])) == 0
    shown = capsys.readouterr().out
    assert f"after step {plain.best}" in shown
    assert "after step  rows" in shown


def best_of(folder: Path) -> list[int]:
    """The step that `checkpoint ls` marks. The first evaluation's checkpoint, which was not the best, is gone."""
    rows = checkpoint_rows(source_in(folder))
    assert min(row.step for row in rows) > EVERY
    return [row.step for row in rows if row.best and row.complete]


def merged(folder: Path, file: Path, *options: str) -> dict[str, torch.Tensor]:
    with redirect_stdout(io.StringIO()):
        assert run(["export", str(folder), str(file), *options]) == 0
    return load_file(file)


KEEPING = ("evaluation.keep_best=true", "model.options={seconds=0.03}")


@pytest.mark.parametrize(
    "kills",
    [
        pytest.param((("worker-2", LAST_OF_ROUND), ("broker", 40)), marks=pytest.mark.slow),
        pytest.param((("worker-1", MIDDLE + 20), ("worker-2", MIDDLE + 40)), marks=pytest.mark.slow),
    ],
    ids=["last stage and broker", "others"],
)
def test_the_checkpoint_of_the_best_round_is_kept(kills: Any, fork_server: ForkServer, tmp_path: Path):
    here = tmp_path / "run"
    outcome = fork_server.train(PLAN, f"run.dir={tmp_path}", *KEEPING, folder=here, kills=kills)
    assert outcome["code"] == 0, outcome["reason"]
    plain = evaluated_loop()
    check(outcome["facts"], plain)
    assert best_of(here) == [plain.best]
    best = merged(here, tmp_path / "best.safetensors", "--best")
    assert not differing(best, plain.states[plain.best])
    assert not differing(merged(here, tmp_path / "last.safetensors"), plain.states[STEPS])


@pytest.mark.slow
def test_a_run_that_was_stopped_has_its_best_checkpoint_and_goes_on(fork_server: ForkServer, tmp_path: Path):
    here = tmp_path / "run"
    kills = [("worker-0", 16 * 5 + 5 * 4), ("worker-0", 1)]  # in step 16; then nothing replaces it
    sets = (f"run.dir={tmp_path}", *KEEPING, "recovery.restarts=1")
    ended = fork_server.train(PLAN, *sets, folder=here, kills=kills)
    assert ended["code"] == 1
    plain = evaluated_loop()
    assert best_of(here) == [plain.best]
    assert not differing(merged(here, tmp_path / "best.safetensors", "--best"), plain.states[plain.best])
    resumed = fork_server.train(PLAN, *sets, folder=here, resume=True)
    assert resumed["code"] == 0, resumed["reason"]
    assert resumed["facts"]["evaluations"] == plain.rounds
    assert resumed["facts"]["weights_sha256"] == plain.weights_sha256
    assert best_of(here) == [plain.best]


def test_the_best_of_a_plan_that_keeps_none_is_refused(workspace: Workspace, capsys: pytest.CaptureFixture[str]):
    assert workspace.here("train", str(PLAN), "--set", "queues.url=memory://") == 0
    folder = str(workspace.runs()[0])
    assert workspace.here("export", folder, "best.safetensors", "--best") == 2
    assert "keeps no best checkpoint: evaluation.keep_best = true does. Name a step" in capsys.readouterr().err
    assert workspace.here("export", folder, "best.safetensors", "--best", "--step", "3") == 2
    assert "--step and --best name two checkpoints" in capsys.readouterr().err


REASON = "stopped early after step 12: loss was not better than 0.921516 (step 6) in 2 evaluations"


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("patience", [1, 2, 3])
def test_a_run_ends_early_after_the_step_that_the_plain_loop_ends_at(layout: str, patience: int, tmp_path: Path):
    facts, plain = (
        in_memory(tmp_path, *LAYOUTS[layout], f"evaluation.patience={patience}"),
        evaluated_loop(patience=patience),
    )
    check(facts, plain)
    assert plain.steps == 6 + 3 * patience
    assert facts["finished"] == [plain.steps] * len(facts["finished"])
    assert facts["stopped_early"] == facts["reason"]
    assert facts["reason"].startswith(f"stopped early after step {plain.steps}: loss was not better than ")


def test_a_run_whose_last_round_would_end_it_has_done_all_its_steps(tmp_path: Path):
    facts = in_memory(tmp_path, "evaluation.patience=3", "run.steps=15")
    assert facts["evaluations"] == evaluated_loop(patience=3).rounds
    assert (facts["training_steps"], facts["stopped_early"], facts["reason"]) == (15, None, "all steps are done")


def test_a_metric_that_is_never_a_number_ends_a_run_early_and_says_so(tmp_path: Path):
    metrics = ('model.metrics=["model.py:never"]', "evaluation.metric=never", "evaluation.better=lower")
    facts = in_memory(tmp_path, *metrics, "evaluation.patience=2")
    assert facts["reason"] == "stopped early after step 6: never was no finite number in 2 evaluations"


# Of each worker, actions up to the end of the round after step 12: 12 steps of 5, 4 rounds of 4, and 3 verdicts. The
# next action is the verdict that ends the run: the last stage's worker tells the others, and goes by it itself.
TOLD = 12 * 5 + 4 * 4 + 3


@pytest.mark.slow
@pytest.mark.parametrize(
    "kills",
    [
        (("worker-2", TOLD + 1), ("worker-1", TOLD), ("broker", 40)),
        (("worker-2", TOLD),),
        (("worker-2", TOLD + 1), ("worker-2", 4)),
        (("worker-0", TOLD), ("worker-1", TOLD - 2)),
        (("worker-0", TOLD), ("worker-1", TOLD), ("worker-2", TOLD)),
        (("worker-0", TOLD + 1), ("worker-2", TOLD + 1)),
    ],
    ids=["on its way", "before it", "twice", "told", "all", "after it"],
)
def test_a_run_ends_early_after_the_same_step_whatever_is_killed(kills: Any, fork_server: ForkServer, tmp_path: Path):
    here = tmp_path / "run"
    sets = (f"run.dir={tmp_path}", *KEEPING, "evaluation.patience=2")
    outcome = fork_server.train(PLAN, *sets, folder=here, kills=kills)
    assert (outcome["code"], outcome["reason"]) == (0, REASON)
    assert outcome["not killed"] == outcome["orphans"] == outcome["left"] == []
    plain = evaluated_loop(patience=2)
    check(outcome["facts"], plain)
    assert not differing(merged(here, tmp_path / "best.safetensors", "--best"), plain.states[plain.best])
    assert not differing(merged(here, tmp_path / "last.safetensors"), plain.states[plain.steps])


@pytest.mark.slow
def test_a_run_that_was_killed_before_its_early_end_is_resumed_and_ends_there(fork_server: ForkServer, tmp_path: Path):
    here, plain = tmp_path / "run", evaluated_loop(patience=2)
    sets = (f"run.dir={tmp_path}", *KEEPING, "evaluation.patience=2", "recovery.restarts=1")
    ended = fork_server.train(PLAN, *sets, folder=here, kills=[("worker-1", TOLD), ("worker-1", 1)])
    assert ended["code"] == 1
    resumed = fork_server.train(PLAN, *sets, folder=here, resume=True)
    assert (resumed["code"], resumed["reason"]) == (0, REASON)
    assert resumed["facts"]["evaluations"] == plain.rounds
    assert resumed["facts"]["weights_sha256"] == plain.weights_sha256


@pytest.mark.slow
def test_the_result_says_why_the_run_ended_early(workspace: Workspace, capsys: pytest.CaptureFixture[str]):
    sets = ("--set", "queues.url=memory://", "--set", "evaluation.patience=2")
    assert workspace.here("train", str(PLAN), "--json", *sets) == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["steps"], result["stopped_early"]) == (12, REASON)
    folder = str(workspace.runs()[0])
    assert workspace.here("why", "--json", folder) == 0
    assert json.loads(capsys.readouterr().out)["text"] == REASON
    assert workspace.here("status", folder) == 0
    assert f"steps           12, {REASON}" in capsys.readouterr().out
    assert workspace.here("train", str(PLAN), "--resume", folder, *sets) == 2
    assert "has finished" in capsys.readouterr().err
