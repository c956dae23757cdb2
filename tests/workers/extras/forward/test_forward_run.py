"""A run's model forward over its stages, inline, on plans of many kinds: the bits of the unsplit model."""

from pathlib import Path

import pytest
import torch

from stageline import DataError
from stageline.pipeline.tree import Tree
from stageline.workers.extras.exchange.load import run_model
from stageline.workers.extras.forward.forward_run import ForwardFailed, ForwardRun
from support.workspace import MODEL, Workspace

TIED = """
import torch
from torch import nn
from stageline import Layer, Layers

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.into, self.mid, self.out = nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 4)
        self.out.weight = nn.Parameter(self.into.weight.detach().T.clone())
        self.again = self.into

    def forward(self, x):
        return self.again(self.out(self.mid(self.into(x)).relu()))[:, :2]

def build():
    net = Net()
    cut = Layer(("again",), lambda x, again: again(x)[:, :2])
    return Layers(net, [Layer("into"), Layer("mid", lambda x, mid: mid(x).relu()), Layer("out"), cut])

def accuracy(outputs, targets):
    return (outputs.argmax(1) == targets).float().mean()
"""
THREE = ("model.cut=[1,2]", "workers.0.stages=[0,2]", "workers.1.stages=[1]", "schedule.name=gpipe")
PLANS = {
    "one worker has two stages": (MODEL, THREE),
    "gradients of several batches": (MODEL, ("schedule.accumulate=2", "run.steps=4")),
    "asynchronous": (MODEL, ("schedule.mode=async", "schedule.microbatches=1")),
    "bfloat16": (MODEL, ("model.autocast=bf16",)),
    "most is frozen": (MODEL, ('model.trainable=["2.bias"]',)),
    "two stages share a parameter": (TIED, ("model.cut=['mid','again']",)),
}


def trained(workspace: Workspace, model: str, sets: tuple[str, ...]) -> Path:
    workspace.write("model.py", model)
    words = [word for each in ("queues.url=memory://", *sets) for word in ("--set", each)]
    assert workspace.here("train", ".", *words) == 0
    (run,) = workspace.runs()
    return run


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("kind", PLANS)
def test_every_plan_predicts_what_its_unsplit_model_does(workspace: Workspace, kind: str) -> None:
    model = run_model(trained(workspace, *PLANS[kind]))
    count = model.plan.schedule.in_step
    batches = [torch.randn(rows, 4, generator=torch.Generator().manual_seed(rows)) for rows in (7, 1, 12, 0)]
    with ForwardRun(model, "inline") as run:
        found = list(run.predictions(batches))
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=kind == "bfloat16", cache_enabled=False):
        wanted = [torch.cat([model.module(each) for each in batch.tensor_split(count)]) for batch in batches]
    assert all(isinstance(a, torch.Tensor) and torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def test_a_loss_that_fails_and_batches_without_a_common_number_of_rows_are_errors(workspace: Workspace) -> None:
    model = run_model(trained(workspace, MODEL, ()))

    def broken(outputs: Tree, targets: Tree) -> torch.Tensor:
        raise ZeroDivisionError("nothing")

    batch = torch.randn(3, 4), torch.tensor([0, 1, 1])
    with ForwardRun(model, "inline", loss=broken) as run:
        with pytest.raises(DataError, match="no common number of rows"):
            run.evaluate([(batch[0], batch[1][:2])])
        with pytest.raises(ForwardFailed, match=r"the loss: ZeroDivisionError: .*The batch is float32 \[3, 4\]"):
            run.evaluate([batch])
    with ForwardRun(model, "inline", loss=torch.nn.functional.cross_entropy) as run:
        assert run.evaluate([batch]).rows == 3
        with pytest.raises(DataError, match="there are no rows to evaluate"):
            run.evaluate([])
