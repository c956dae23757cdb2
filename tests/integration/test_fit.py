"""`Line.fit` equals a plain loop with evaluation and early stopping, to the bit, whatever is killed on the way."""

import json
import shutil
import signal
from collections.abc import Mapping
from functools import cache, partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor, nn

from stageline import Line, load_weights
from stageline.workers.runs.metrics import StepMetrics, metrics_in
from support.fork_server import ForkServer
from support.paths import TESTS
from support.plain_loop import PlainLoop, differing
from support.redis_server import shared_server
from support.script import overfitted
from support.workspace import Workspace, free_port

SCRIPT = TESTS / "support" / "script" / "fit.py"
EVERY, PATIENCE, MICROBATCHES = 4, 3, 3

pytestmark = pytest.mark.usefixtures("one_thread")


def measured(model: nn.Sequential) -> dict[str, float]:
    """Means over the rows held out."""
    model.eval()
    sums = {"loss": 0.0, "accuracy": 0.0}
    rows = 0
    for x, y in overfitted.held_out():
        of_batch = dict.fromkeys(sums, 0.0)
        for inputs, targets in zip(x.tensor_split(MICROBATCHES), y.tensor_split(MICROBATCHES), strict=True):
            if len(inputs):
                with torch.no_grad():
                    outputs = model(inputs)
                of_batch["loss"] += nn.functional.cross_entropy(outputs, targets).item() * len(inputs)
                of_batch["accuracy"] += float(overfitted.accuracy(outputs, targets)) * len(inputs)
        sums = {name: value + of_batch[name] for name, value in sums.items()}
        rows += len(x)
    model.train()
    return {name: value / rows for name, value in sums.items()}


def digest(weights: Mapping[str, Tensor]) -> str:
    return sha256(b"".join(weights[name].contiguous().numpy().tobytes() for name in sorted(weights))).hexdigest()


@cache
def plain() -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Results of the loop that a user would write: as `fit.py` prints it, and its weights."""
    model = overfitted.build()
    loop = PlainLoop(model, nn.functional.cross_entropy, torch.optim.AdamW(model.parameters(), lr=0.03), MICROBATCHES)
    evaluations: dict[str, dict[str, float]] = {}
    best, at, since, weights = float("inf"), 0, 0, ""
    for _ in range(50):
        for batch in overfitted.batches():
            loop.train([batch])
            if len(loop.losses) % EVERY == 0 and since < PATIENCE:
                evaluations[str(len(loop.losses))] = found = measured(model)
                since += 1
                if found["loss"] < best:
                    best, at, since, weights = found["loss"], len(loop.losses), 0, digest(model.state_dict())
            if since == PATIENCE:
                break
        if since == PATIENCE:
            break
    came_to = {
        "steps": len(loop.losses),
        "loss": loop.losses[-1],
        "evaluations": evaluations,
        "best": [at, best],
        "weights": digest(model.state_dict()),
    }
    return {**came_to, "losses": loop.losses, "best_weights": weights}, model.state_dict()


def test_the_plain_loop_stops_early_and_not_at_its_first_evaluations() -> None:
    came_to, _ = plain()
    assert PATIENCE < len(came_to["evaluations"]) < 50 * 6 / EVERY
    assert EVERY < came_to["best"][0] < came_to["steps"]


def test_fit_is_the_plain_loop_with_evaluation_and_early_stopping() -> None:
    came_to, weights = plain()
    with Line(
        overfitted.build(),
        cut=[2, 4],
        loss=nn.functional.cross_entropy,
        optimizer=partial(torch.optim.AdamW, lr=0.03),
        microbatches=MICROBATCHES,
        metrics=[overfitted.accuracy],
        workers="inline",
    ) as line:
        fitted = line.fit(
            overfitted.batches(),
            epochs=50,
            held_out=overfitted.held_out(),
            evaluate_every=EVERY,
            patience=PATIENCE,
        )
        assert not differing(line.state_dict(), weights)
        assert line.evaluate(overfitted.held_out()) == came_to["evaluations"][str(fitted.steps)]
    assert fitted.stopped_early
    assert fitted.reason.startswith(f"stopped early after step {came_to['steps']}: loss was not better than ")
    assert fitted.best is not None
    assert {
        "steps": fitted.steps,
        "loss": fitted.loss,
        "evaluations": {str(step): found for step, found in fitted.evaluations.items()},
        "best": [fitted.best.step, fitted.best.value],
    } == {name: came_to[name] for name in ("steps", "loss", "evaluations", "best")}


def result(workspace: Workspace, *arguments: str, **environment: str) -> dict[str, Any]:
    script = workspace.start("script", str(SCRIPT), *arguments, **environment)
    said, errors = script.communicate()
    assert script.returncode == 0, errors
    return dict(json.loads(said))


def demand_plain(found: dict[str, Any]) -> None:
    """The script has the results of the plain loop; it was told each loss of its steps in order."""
    came_to, _ = plain()
    assert {name: found[name] for name in ("steps", "loss", "evaluations", "best", "weights")} == {
        name: came_to[name] for name in ("steps", "loss", "evaluations", "best", "weights")
    }
    losses = {int(step): loss for step, loss in found["losses"].items()}
    assert list(losses.items()) == [(step, came_to["losses"][step]) for step in range(found["first"], found["steps"])]


@pytest.mark.slow
@pytest.mark.parametrize("happens", [[], ["kill", "worker-2", "9"]], ids="-".join)
def test_fit_on_processes_is_the_plain_loop_also_if_a_worker_is_killed(
    workspace: Workspace, happens: list[str]
) -> None:
    found = result(workspace, "processes", *happens)
    demand_plain(found)
    assert found["told"][:2] == [["evaluation", 4, 3], ["best", 4, found["evaluations"]["4"]["loss"]]]


@pytest.mark.slow
@pytest.mark.parametrize("at", [["worker-2", "5", "script", "10"], ["script", "17"]])
def test_fit_that_was_killed_and_is_resumed_stops_at_the_same_step(workspace: Workspace, at: list[str]) -> None:
    """With the evaluations of before; and the checkpoint of the best is one to go on from."""
    script = workspace.start("script", str(SCRIPT), "processes", "kill", *at)
    script.communicate()
    assert script.returncode == -signal.SIGKILL
    found = result(workspace, "processes", "resume")
    assert 0 < found["first"] <= int(at[-1]) + 3
    demand_plain(found)
    (folder,) = workspace.runs()
    lines = [line for line in metrics_in(folder) if isinstance(line, StepMetrics)]
    assert [(line.step, line.loss) for line in lines] == list(enumerate(plain()[0]["losses"]))
    best = result(workspace, "processes", "best")
    assert best == {"first": found["best"][0], "weights": plain()[0]["best_weights"]}
    known = [int(step) for step in found["evaluations"] if int(step) <= best["first"]]
    assert [line.step for line in metrics_in(workspace.folder / "best")] == known
    begun = next(run for run in workspace.runs() if run != folder)  # the run that went on from it
    assert [line.step for line in metrics_in(begun) if not isinstance(line, StepMetrics)] == known


@pytest.mark.slow
def test_rates_that_follow_evaluations_are_the_same_after_losses_and_a_resume(workspace: Workspace) -> None:
    """A checkpoint after 8 steps is of before the step of the schedulers by the evaluation that follows it."""
    whole = result(workspace, "inline", PLATEAU="1")
    terms = {"PLATEAU": "1", "SNAPSHOT_EVERY": "4"}
    script = workspace.start("script", str(SCRIPT), "processes", "kill", "worker-0", "8", "script", "12", **terms)
    script.communicate()
    assert script.returncode == -signal.SIGKILL
    found = result(workspace, "processes", "resume", **terms)
    assert found["first"] > 0
    kept = ("steps", "loss", "evaluations", "best", "weights")
    assert {name: found[name] for name in kept} == {name: whole[name] for name in kept}
    assert whole["weights"] != plain()[0]["weights"]


@pytest.mark.slow
@pytest.mark.parametrize(("at", "snapshots"), [(10, 5), (17, 5), (10, 4)])
def test_fit_whose_processes_were_all_killed_is_resumed_over_redis(
    workspace: Workspace, at: int, snapshots: int
) -> None:
    """Redis still had the calls of before: to save the best in a folder whose name was drawn, and evaluations that the
    resumed fit had no need of. They were compared with the calls of the resumed one, and carried out by its workers."""
    server = shared_server()
    terms = {"QUEUES": server.tcp_url_of(server.own_number()), "SNAPSHOT_EVERY": str(snapshots)}
    script = workspace.start("script", str(SCRIPT), "processes", "kill-all", str(at), **terms)
    script.communicate()
    assert script.returncode == -signal.SIGKILL
    found = result(workspace, "processes", "resume", **terms)
    assert found["first"] % snapshots == 0
    demand_plain(found)
    best = result(workspace, "processes", "best", **terms)
    assert best == {"first": found["best"][0], "weights": plain()[0]["best_weights"]}


@pytest.mark.slow
def test_what_a_callback_raises_ends_the_run_as_it_does_in_a_loop_and_it_goes_on(workspace: Workspace) -> None:
    script = workspace.start("script", str(SCRIPT), "processes", "raise", "6")
    _, errors = script.communicate()
    assert script.returncode == 1
    assert "ValueError: a mistake in a callback" in errors
    assert "raised by Happening.on_step of step 6, a callback of Line.fit" in errors
    found = result(workspace, "processes", "resume")
    assert found["first"] in (8, 9)  # two more were under way
    demand_plain(found)


@pytest.mark.slow
def test_ctrl_c_in_a_fit_loses_no_step(workspace: Workspace) -> None:
    script = workspace.start("script", str(SCRIPT), "processes", "interrupt", "9")
    _, errors = script.communicate()
    assert script.returncode in (-signal.SIGINT, 130, 1)
    assert "KeyboardInterrupt" in errors
    found = result(workspace, "processes", "resume")
    assert found["first"] in (11, 12)
    demand_plain(found)


@pytest.mark.slow
def test_fit_with_workers_that_join_is_the_plain_loop_and_the_script_has_its_metrics_and_its_best_checkpoint(
    workspace: Workspace, tmp_path: Path, fork_server: ForkServer
) -> None:
    address, folder = f"tcp://127.0.0.1:{free_port()}", tmp_path / "there"
    folder.mkdir()
    with Workspace(folder, fork_server) as there:
        shutil.copy(SCRIPT.parent / "overfitted.py", folder)
        workers = [there.start("worker", "--join", address) for _ in range(3)]
        found = result(workspace, address)
        assert [worker.wait() for worker in workers] == [0] * 3
        demand_plain(found)
        there_steps, lines = list(metrics_in(there.runs()[0])), list(metrics_in(workspace.runs()[0]))
    steps = [line for line in lines if isinstance(line, StepMetrics)]
    assert [(line.step, line.loss) for line in steps] == list(enumerate(plain()[0]["losses"]))
    assert [msgspec.structs.replace(line, time=0.0) for line in steps] == [
        msgspec.structs.replace(line, time=0.0) for line in there_steps
    ]
    assert [str(line.step) for line in lines if line not in steps] == list(plain()[0]["evaluations"])
    best = load_weights(workspace.runs()[0], best=True)
    assert digest(best) == plain()[0]["best_weights"]
    went_on = result(workspace, "processes", "best")  # with workers of this machine
    assert went_on == {"first": found["best"][0], "weights": plain()[0]["best_weights"]}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "at", "happens"), [("torch", "7", "save"), ("torch", "7", "raise"), ("reseeded", "7", "save")]
)
def test_a_fit_that_goes_on_in_an_epoch_whose_order_is_another_is_refused(
    workspace: Workspace, kind: str, at: str, happens: str
) -> None:
    """It went on with rows that it had trained on before, and left out others, without a word."""
    script = workspace.start("script", str(SCRIPT.with_name("shuffled.py")), kind, at, happens)
    said, errors = script.communicate()
    found = json.loads(said)
    assert found["steps"] == 7, errors
    facts = ("DataLoader" if kind == "torch" else "Loader", "line.position, which is 7", "generator=", "data.check")
    assert all(fact in found["said"] for fact in facts), found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "at", "happens"),
    [
        ("generator", "7", "save"),
        ("Loader", "7", "save"),
        ("Loader", "7", "raise"),
        ("torch", "5", "save"),  # an epoch is over: each row is trained once in the next
        ("torch", "7", "unchecked"),
    ],
)
def test_a_fit_goes_on_with_the_order_of_before_between_epochs_and_unchecked(
    workspace: Workspace, kind: str, at: str, happens: str
) -> None:
    script = workspace.start("script", str(SCRIPT.with_name("shuffled.py")), kind, at, happens)
    said, errors = script.communicate()
    assert json.loads(said) == {"steps": 12, "said": ""}, errors


@pytest.mark.slow
def test_a_fit_that_is_refused_does_not_count(tmp_path: Path) -> None:
    """The script without it found none of its evaluations when it was resumed, since they were of another fit."""
    batches = [(torch.ones(4, 2), torch.zeros(4, 2))] * 2
    options: Any = {"loss": nn.functional.mse_loss, "optimizer": partial(torch.optim.SGD, lr=0.1), "folder": tmp_path}
    with Line(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), stages=2, **options) as line:
        with pytest.raises(ValueError, match="epochs = 2"):
            line.fit(iter(batches), epochs=2)
        line.fit(batches, held_out=batches, evaluate_every="epoch")
        assert line.folder is not None
        assert [json.loads(each)["fit"] for each in (line.folder / "evaluations.jsonl").read_text().splitlines()] == [1]
