"""A learning rate scheduler steps after each step, after each epoch or after so many steps, as in a plain loop."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from stageline import Line, ModelRefused, PlanRefused
from support import reference
from support.fork_server import ForkServer
from support.paths import EXAMPLES
from support.plain_loop import PlainLoop, differing
from support.small_models import SMALL_MODELS
from support.workspace import Workspace

SGD = partial(torch.optim.SGD, lr=0.3)
HALVED = partial(torch.optim.lr_scheduler.StepLR, step_size=1, gamma=0.5)
MLP = EXAMPLES / "mlp"  # 320 rows, of which this leaves out the last

pytestmark = pytest.mark.usefixtures("one_thread")


OF_EPOCHS = (
    "data.batch_size=64",
    "data.options.short_tenth=true",
    "run.log_every=1",
    "schedule.microbatches=2",
    "lr_scheduler.factory=torch.optim.lr_scheduler.StepLR",
    "lr_scheduler.step_size=1",
    "lr_scheduler.gamma=0.5",
    "lr_scheduler.every=epoch",
)


def _plain(steps: int) -> PlainLoop:
    """Epochs have 5 steps."""
    recipe = reference.recipe(MLP, batch_size=64, microbatches=2, changes={"data.options.short_tenth": True})
    torch.manual_seed(recipe.seed)
    model = recipe.build()
    optimizer = recipe.optimizer(model.parameters())
    halved = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    rows = ((x, y) for x, y in map(recipe.batch, range(steps)))
    return PlainLoop(model, recipe.loss, optimizer, 2, seed=recipe.seed, lr_scheduler=halved, lr_every=5).train(rows)


def _sets(*sets: str) -> list[str]:
    return [word for each in sets for word in ("--set", each)]


def test_a_plans_scheduler_steps_after_each_epoch(workspace: Workspace, capsys: Any) -> None:
    sets = [*OF_EPOCHS, "run.steps=13", "queues.url=memory://", f"run.dir={workspace.folder}"]
    assert workspace.here("train", str(MLP), "--json", *_sets(*sets)) == 0
    result, plain = json.loads(capsys.readouterr().out), _plain(13)
    assert [*result["losses"].values()] == plain.losses
    assert result["weights_sha256"] == reference.weights_sha256(plain.state())


@pytest.mark.slow
def test_workers_without_data_are_told_how_long_an_epoch_is_and_replaced_ones_go_on_within_it(
    fork_server: ForkServer, workspace: Workspace
) -> None:
    folder = workspace.folder
    sets = [*OF_EPOCHS, "run.steps=13", "model.cut=[1, 2]", "recovery.snapshot_every=3", f"run.dir={folder}"]
    placed = [f"workers.{index}.stages=[{index}]" for index in range(3)]
    kills = [("worker-1", 5 * 7 + 3), ("worker-0", 5 * 8)]
    outcome = fork_server.train(MLP / "stageline.toml", *sets, *placed, folder=folder / "run", kills=kills)
    assert outcome["code"] == 0, outcome["reason"]
    assert outcome["not killed"] == []
    assert outcome["facts"]["weights_sha256"] == reference.weights_sha256(_plain(13).state())


SMALL = SMALL_MODELS["transformer"]
GIVEN: dict[str, Any] = {"loss": SMALL.loss, "optimizer": SGD, "lr_scheduler": HALVED, "workers": "inline"}


def _batches(count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [SMALL.batch(number, 4) for number in range(count)]


@pytest.mark.parametrize(
    ("accumulate", "workers"), [(1, "inline"), (2, "inline"), pytest.param(1, "processes", marks=pytest.mark.slow)]
)
def test_a_lines_scheduler_steps_after_each_epoch_of_a_fit(accumulate: int, workers: Any, tmp_path: Path) -> None:
    batches = _batches(4)
    model = SMALL.build()
    optimizer = SGD(model.parameters())
    plain = PlainLoop(
        model, SMALL.loss, optimizer, 2, accumulate, lr_scheduler=HALVED(optimizer), lr_every=4 // accumulate
    ).train(batches * 3)
    given = {**GIVEN, "workers": workers, "folder": tmp_path, "accumulate": accumulate}
    with Line(SMALL.build(), lr_every="epoch", stages=2, microbatches=2, **given) as line:
        first = line.fit(batches, steps=5 // accumulate)  # the next fit goes on within the second epoch
        fitted = line.fit(batches, epochs=3)
        assert not differing(line.state_dict(), plain.state())
    assert (first.steps, fitted.steps, fitted.loss) == (5 // accumulate, 12 // accumulate, plain.losses[-1])


PLATEAU = partial(torch.optim.lr_scheduler.ReduceLROnPlateau, factor=0.5, patience=0)
FOLLOWS: dict[str, Any] = {**GIVEN, "lr_scheduler": PLATEAU, "lr_every": "evaluation", "cut": [1, 3], "microbatches": 2}


def _followed(steps: int, batches: Any, held_out: Any) -> PlainLoop:
    model = SMALL.build()
    optimizer = SGD(model.parameters())
    plain, scheduler = PlainLoop(model, SMALL.loss, optimizer, 2), PLATEAU(optimizer)
    for step in range(steps):
        plain.train([batches[step % len(batches)]])
        if (step + 1) % 2 == 0:
            model.eval()
            with torch.no_grad():
                parts = zip(held_out[0].tensor_split(2), held_out[1].tensor_split(2), strict=True)
                scheduler.step(sum(SMALL.loss(model(x), y).item() * len(x) for x, y in parts) / len(held_out[0]))
            model.train()
    assert optimizer.param_groups[0]["lr"] < 0.3  # it was halved
    return plain


def test_a_lines_rates_may_follow_the_evaluations_of_a_fit() -> None:
    batches, held_out = _batches(5), SMALL.batch(9, 4)
    with Line(SMALL.build(), **FOLLOWS) as line:
        fitted = line.fit(batches, steps=9, held_out=[held_out], evaluate_every=2)
        assert not differing(line.state_dict(), _followed(9, batches, held_out).state())
        with pytest.raises(ModelRefused, match=r'lr_every = "evaluation": step alone does not evaluate'):
            line.step(*batches[0])
        with pytest.raises(ValueError, match=r'lr_every = "evaluation": say after how many steps'):
            line.fit(batches, steps=12)
    assert fitted.steps == 9


def test_a_scheduler_that_steps_by_a_value_has_to_follow_evaluations() -> None:
    with pytest.raises(ModelRefused, match=r'lr_scheduler.*ReduceLROnPlateau steps by .* use lr_every = "evaluation"'):
        Line(SMALL.build(), **{**FOLLOWS, "lr_every": 1})


@pytest.mark.slow
@pytest.mark.parametrize("saved", [3, 4])
def test_rates_that_follow_evaluations_go_on_from_what_was_saved(saved: int, tmp_path: Path) -> None:
    """After 4 steps there is an evaluation, by which no scheduler has stepped before the next step."""
    batches, held_out = _batches(5), SMALL.batch(9, 4)
    given = {**FOLLOWS, "workers": "processes", "folder": tmp_path}
    wanted = {"held_out": [held_out], "evaluate_every": 2}
    with Line(SMALL.build(), **given) as line:
        line.fit(batches, steps=saved, **wanted)
        line.save(tmp_path / "saved")
    with Line.resume(tmp_path / "saved", SMALL.build(), **given) as line:
        line.fit(batches, steps=9, **wanted)
        assert not differing(line.state_dict(), _followed(9, batches, held_out).state())


def test_only_fit_knows_how_long_an_epoch_is() -> None:
    ((x, y),) = _batches(1)
    with Line(SMALL.build(), lr_every="epoch", stages=2, **GIVEN) as line:
        with pytest.raises(ModelRefused, match=r'lr_every = "epoch": .*fit.*lr_every=len\(loader\)'):
            line.step(x, y)
        with pytest.raises(ValueError, match=r'lr_every = "epoch": the batches, of type generator, have no len\(\)'):
            line.fit(batch for batch in [(x, y)])
        line.fit([(x, y)])
        with pytest.raises(ModelRefused, match="step alone"):
            line.step(x, y)


def test_what_cannot_be_is_refused(workspace: Workspace, capsys: Any) -> None:
    with pytest.raises(PlanRefused, match=r'lr_every = 0: expected "step", "epoch", "evaluation" or a number of'):
        Line(SMALL.build(), lr_every=0, **GIVEN)
    with (
        Line(SMALL.build(), lr_every="epoch", accumulate=2, stages=2, **GIVEN) as line,
        pytest.raises(ValueError, match=r'lr_every = "epoch": an epoch has 3 batches, .* accumulate = 2'),
    ):
        line.fit(_batches(3), epochs=2)
    sets = _sets(*OF_EPOCHS, "schedule.accumulate=2", "run.steps=4")
    assert workspace.here("plan", str(MLP), *sets) == 78
    assert 'lr_scheduler.every = "epoch": an epoch has 5 batches, which are no whole' in capsys.readouterr().err
