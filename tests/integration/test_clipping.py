"""Gradients of several stages are clipped by the norm of all of them, as the unsplit model's are, to the bit."""

import json
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from stageline import ComputeFailed, Line, PlanRefused
from stageline.pipeline.plan import read_plan
from stageline.pipeline.program import Tied
from support import reference
from support.fork_server import ForkServer
from support.plain_loop import PlainLoop, differing
from support.small_models import SMALL_MODELS
from support.tied_per_step import OwnWeights
from support.workspace import Workspace

STEPS, MICROBATCHES, ROWS = 5, 4, 10
MOST = 0.3  # below every norm
ADAM = partial(torch.optim.AdamW, lr=0.02)
TIED = Path(reference.__file__).parent / "tied"
IN_MEMORY = ("--set", "queues.url=memory://")

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("name", SMALL_MODELS)
def test_gradients_whose_norm_is_small_are_left_as_they_are(name: str) -> None:
    small, most = SMALL_MODELS[name], 1000.0
    plain = _plain(name, small.build(), most)
    with _line(name, small.build(), clip_norm=most) as line:
        losses = [line.step(*batch) for batch in _batches(name)]
    assert [loss.item() for loss in losses] == plain.losses
    assert [loss.gradient_norm for loss in losses] == plain.norms
    assert not differing(line.state_dict(), plain.state())
    assert max(plain.norms) < most


def test_a_gradient_that_is_no_number_stops_the_run_before_any_update() -> None:
    small = SMALL_MODELS["convolutions"]
    model = small.build()
    model[3].weight.register_hook(lambda gradient: gradient * float("inf"))
    with _line("convolutions", model, clip_norm=MOST) as line:
        with pytest.raises(
            ComputeFailed, match=r"stage 1 failed in 1N of step 0, the gradients: .*gradient of conv2.weight"
        ):
            line.step(*small.batch(0, ROWS)).item()
        assert not differing(line._run.weights(), small.build().state_dict() | _statistics(model))


def test_a_loss_that_is_no_number_is_named_before_its_gradients() -> None:
    small = SMALL_MODELS["transformer"]

    def broken(outputs: Tensor, targets: Tensor) -> Tensor:
        return small.loss(outputs, targets) * float("nan")

    line = _line("transformer", small.build(), loss=broken, clip_norm=MOST)
    with line, pytest.raises(ComputeFailed, match="the loss of microbatch 0 of step 0 is nan"):
        line.step(*small.batch(0, ROWS)).item()


def test_a_plan_that_cannot_clip_is_refused() -> None:
    with pytest.raises(PlanRefused, match=r"optimizer.clip_norm = 0: expected a number above 0, such as 1.0"):
        read_plan(TIED, sets=["optimizer.clip_norm=0"])
    with pytest.raises(PlanRefused, match=r'optimizer.clip_norm = 1.0: mode = "async" does not support it'):
        read_plan(TIED, sets=["optimizer.clip_norm=1.0", "schedule.mode=async", "schedule.microbatches=1"])
    with pytest.raises(PlanRefused, match="clip_norm = -1: expected a number above 0"):
        _line("transformer", SMALL_MODELS["transformer"].build(), clip_norm=-1)


# 11 actions of stage 0 in a step, of which the tenth clips; 15 of stage 3, of which the thirteenth sends norms.
NORMS_ARE_SENT, TOTAL_IS_KNOWN = ("worker-3", 2 * 15 + 13), ("worker-0", 3 * 11 + 9)


@pytest.mark.slow
@pytest.mark.parametrize(
    "kills",
    [(NORMS_ARE_SENT,), (TOTAL_IS_KNOWN,), (NORMS_ARE_SENT, TOTAL_IS_KNOWN, ("worker-1", 4 * 11 + 10))],
    ids=["norms are sent", "the total is known", "one after the other"],
)
def test_workers_are_killed_while_norms_are_on_their_way(
    kills: list[Any], fork_server: ForkServer, tmp_path: Path
) -> None:
    sets = [f"run.dir={tmp_path}", "optimizer.clip_norm=0.3"]
    outcome = fork_server.train(TIED / "stageline.toml", *sets, folder=tmp_path / "run", kills=kills)
    assert outcome["code"] == 0, outcome["reason"]
    assert outcome["not killed"] == []
    assert outcome["facts"]["weights_sha256"] == _tied_and_clipped("microbatch").weights_sha256


@pytest.mark.slow
def test_a_script_of_processes_is_told_the_norm_of_each_step(workspace: Workspace) -> None:
    model = SMALL_MODELS["transformer"].build
    plain = _plain("transformer", model(), MOST)
    with _line("transformer", model(), clip_norm=MOST, workers="processes", folder=workspace.folder) as line:
        assert [line.step(*batch).gradient_norm for batch in _batches("transformer")] == plain.norms
    assert not differing(line.state_dict(), plain.state())


def test_the_result_of_a_plan_has_the_norm_of_the_last_step(workspace: Workspace, capsys: Any) -> None:
    assert workspace.here("train", str(TIED), "--json", "--set", "optimizer.clip_norm=0.3", *IN_MEMORY) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["weights_sha256"] == _tied_and_clipped("microbatch").weights_sha256
    assert result["gradient_norm"] > 0.3


@cache
def _tied_and_clipped(tied: Tied) -> reference.ReferenceResult:
    """Each of the model's parameters counts once; where each stage has its own, the first's counts."""
    recipe = reference.recipe(TIED)
    own: list[OwnWeights] = []

    class Clipping(torch.optim.AdamW):
        def step(self, closure: Any = None) -> Any:
            if own:
                own[0].add_up()
            copies = own[0].copies if own else []
            every = [parameter for group in self.param_groups for parameter in group["params"]]
            nn.utils.clip_grad_norm_([each for each in every if all(each is not copy for copy in copies)], MOST)
            if own:
                own[0].spread()
            return super().step(closure)

    def made() -> nn.Sequential:
        model = recipe.build()
        own.append(OwnWeights([[model[0]], [model[3]], [model[5]]]))
        return model  # type: ignore[return-value]

    build: Callable[[], Any] = recipe.build if tied == "microbatch" else made
    return reference.train(replace(recipe, build=build, optimizer=partial(Clipping, lr=0.05)))


def _batches(name: str) -> list[tuple[Tensor, Tensor]]:
    return [SMALL_MODELS[name].batch(number, ROWS) for number in range(STEPS)]


def _plain(name: str, model: nn.Sequential, most: float) -> PlainLoop:
    optimizer = ADAM([each for each in model.parameters() if each.requires_grad])
    return PlainLoop(model, SMALL_MODELS[name].loss, optimizer, MICROBATCHES, clip_norm=most).train(_batches(name))


def _line(name: str, model: nn.Sequential, **options: Any) -> Line:
    small = SMALL_MODELS[name]
    given = {"loss": small.loss, "optimizer": ADAM, "cut": small.cut, "microbatches": MICROBATCHES, "workers": "inline"}
    return Line(model, **{**given, **options})


def _statistics(model: nn.Sequential) -> dict[str, Tensor]:
    return dict(model.named_buffers())
