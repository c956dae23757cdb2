"""A step of several batches is what a plain loop does that updates after so many, to the bit."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from stageline import DataError, Line, PlanRefused
from stageline.pipeline.plan import read_plan
from support import reference
from support.plain_loop import PlainLoop
from support.small_models import SMALL_MODELS
from support.small_plans import plan
from support.workspace import Workspace

STEPS, MICROBATCHES, ACCUMULATE = 3, 2, 3
SIZES = (5, 8, 4) * STEPS  # rows of the batches
SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
MLP = Path(reference.__file__).parents[2] / "examples" / "mlp"

pytestmark = pytest.mark.usefixtures("one_thread")


def _batches(name: str) -> list[tuple[Tensor, Tensor]]:
    return [SMALL_MODELS[name].batch(number, rows) for number, rows in enumerate(SIZES)]


def _line(name: str, **options: Any) -> Line:
    small = SMALL_MODELS[name]
    given = {"loss": small.loss, "optimizer": SGD, "cut": small.cut, "workers": "inline", "accumulate": ACCUMULATE}
    return Line(small.build(), microbatches=MICROBATCHES, **{**given, **options})


def test_a_step_with_another_number_of_batches_is_refused_and_changes_nothing() -> None:
    batches = _batches("convolutions")
    with _line("convolutions") as line:
        with pytest.raises(
            DataError, match=r"a step has accumulate = 3 batches: x is a tuple .* it is of type Tensor\. Call"
        ):
            line.step(*batches[0])
        with pytest.raises(DataError, match=r"accumulate = 3 batches: x is .* it is of type tuple with 2 entries\."):
            line.step(*zip(*batches[:2], strict=True))
        with pytest.raises(DataError, match="no common number of rows"):
            line.step([x for x, _ in batches[:3]], [y for _, y in batches[1:4]])
        assert line.position == 0


def test_a_plan_draws_the_batches_of_a_step_one_after_the_other(workspace: Workspace, capsys: Any) -> None:
    sets = ["data.batch_size=8", "schedule.microbatches=2", "schedule.accumulate=3", "run.steps=4"]
    sets += ["queues.url=memory://", f"run.dir={workspace.folder}", "run.log_every=1"]
    assert workspace.here("train", str(MLP), "--json", *(word for each in sets for word in ("--set", each))) == 0
    result = json.loads(capsys.readouterr().out)
    recipe = reference.recipe(MLP, batch_size=8, microbatches=2)
    torch.manual_seed(recipe.seed)
    model = recipe.build()
    loop = PlainLoop(model, recipe.loss, recipe.optimizer(model.parameters()), 2, accumulate=3, seed=recipe.seed)
    plain = loop.train(recipe.batch(number) for number in range(12))
    assert [*result["losses"].values()] == plain.losses
    assert result["weights_sha256"] == reference.weights_sha256(plain.state())
    assert result["microbatches"] == 6


def test_epochs_whose_batches_make_no_whole_steps_are_refused(workspace: Workspace, capsys: Any) -> None:
    sets = ["data.batch_size=8", "schedule.microbatches=2", "schedule.accumulate=3", "run.epochs=1"]
    assert workspace.here("plan", str(MLP), *(word for each in sets for word in ("--set", each))) == 78
    assert "run.epochs = 1: " in (said := capsys.readouterr().err)
    assert "are no whole steps of schedule.accumulate = 3 batches; use run.steps = " in said


def test_values_that_do_not_go_together_are_refused() -> None:
    with pytest.raises(PlanRefused, match=r'schedule.accumulate = 2: mode = "async" updates after every microbatch'):
        plan(schedule__mode="async", schedule__microbatches=1, schedule__accumulate=2)
    with pytest.raises(PlanRefused, match=r"accumulate = 40000: microbatches = 2 of each batch make 80000 in a step"):
        plan(schedule__microbatches=2, schedule__accumulate=40000)
    with pytest.raises(PlanRefused, match=r"accumulate = 0: expected a whole number from 1 to 65536"):
        _line("transformer", accumulate=0)
    with pytest.raises(PlanRefused, match=r"schedule.accumulate = 1.5: expected a whole number from 1 to 65536"):
        read_plan(MLP, sets=["schedule.accumulate=1.5"])
