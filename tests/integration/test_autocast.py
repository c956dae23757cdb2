"""Stages that compute in bfloat16 where torch's autocast does are equal to the plain loop with it, to the bit."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from stageline import Line, PlanRefused
from stageline.pipeline.plan import read_plan
from support.paths import EXAMPLES
from support.plain_loop import PlainLoop, differing
from support.small_models import SMALL_MODELS
from support.workspace import Workspace

STEPS, MICROBATCHES, ROWS = 3, 3, 10
ADAM = partial(torch.optim.AdamW, lr=0.02)

pytestmark = pytest.mark.usefixtures("one_thread")


def _line(name: str, **options: Any) -> Line:
    small = SMALL_MODELS[name]
    given = {"loss": small.loss, "optimizer": ADAM, "cut": small.cut, "autocast": "bf16", "workers": "inline"}
    return Line(small.build(), microbatches=MICROBATCHES, **{**given, **options})


@pytest.mark.parametrize("workers", ["inline", pytest.param("processes", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", SMALL_MODELS)
def test_a_line_computes_as_the_plain_loop_with_autocast_does(name: str, workers: str, workspace: Workspace) -> None:
    small = SMALL_MODELS[name]
    batches, model = [small.batch(number, ROWS) for number in range(STEPS)], small.build()
    plain = PlainLoop(model, small.loss, ADAM(model.parameters()), MICROBATCHES, autocast=True).train(batches)
    with _line(name, workers=workers, folder=workspace.folder) as line:
        losses = [line.step(*batch).item() for batch in batches]
        scores = line.predict(batches[0][0])
        found = line.evaluate(batches[:1])
    assert losses == plain.losses
    assert not differing(line.state_dict(), plain.state())
    wanted, loss = _evaluated(model.eval(), small.loss, *batches[0])
    assert scores.dtype is torch.bfloat16
    assert torch.equal(scores, wanted)
    assert found == {"loss": loss}
    exact = small.build()
    without = PlainLoop(exact, small.loss, ADAM(exact.parameters()), MICROBATCHES).train(batches)
    assert without.losses != plain.losses


def _evaluated(model: nn.Module, loss: Any, x: Tensor, y: Tensor) -> tuple[Tensor, float]:
    scores, total = [], 0.0
    for inputs, targets in zip(x.tensor_split(MICROBATCHES), y.tensor_split(MICROBATCHES), strict=True):
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
            scores.append(model(inputs))
            total += loss(scores[-1], targets).item() * len(inputs)
    return torch.cat(scores), total / len(x)


def test_a_weight_that_is_used_twice_in_a_stage_has_its_gradients_added_as_across_a_cut() -> None:
    """With torch's cache of weights that were cast they would be added in bfloat16."""

    class UsedTwice(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(torch.tanh(super().forward(x)))

    def build() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(UsedTwice(6, 6), nn.Linear(6, 2))

    x, y = torch.randn(8, 6), torch.randint(2, (8,))
    model, loss = build(), nn.functional.cross_entropy
    plain = PlainLoop(model, loss, ADAM(model.parameters()), 2, autocast=True).train([(x, y)] * 3)
    with Line(build(), loss=loss, optimizer=ADAM, cut=[1], microbatches=2, autocast="bf16", workers="inline") as line:
        for _ in range(3):
            line.step(x, y)
    assert not differing(line.state_dict(), plain.state())


def test_another_precision_is_refused_and_float16_with_the_reason() -> None:
    with pytest.raises(
        PlanRefused, match=r'model.autocast = "fp16": expected "bf16"; fp16 requires loss scaling, which'
    ):
        read_plan(EXAMPLES / "mlp", sets=["model.autocast=fp16"])
    with pytest.raises(PlanRefused, match=r'autocast = "int8": expected "bf16"'):
        _line("transformer", autocast="int8")
    assert read_plan(EXAMPLES / "mlp", sets=["model.autocast=bf16"]).model.autocast == "bf16"
