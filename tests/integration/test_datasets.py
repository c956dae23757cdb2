"""Runs whose plan names a dataset: readers change nothing, and end with their workers."""

import json
from functools import partial
from itertools import islice
from time import monotonic, sleep
from typing import Any

import psutil
import pytest
import torch
from torch import nn

from stageline import Line, Loader, load_weights
from stageline.workers.control.client import Client
from stageline.workers.runs import folder as runs
from support.workspace import PLAN, Workspace, until

PATIENCE = 50.0  # seconds in which readers have started

DATASET = """
import random
import time

import numpy as np
import torch
from torch.utils.data import Dataset, TensorDataset

x = torch.randn(40, 4, generator=torch.Generator().manual_seed(1))
y = (x.sum(1) > 0).long()

class Noisy(Dataset):
    def __init__(self, wait=0.0):
        self.wait = wait

    def __len__(self):
        return 32

    def __getitem__(self, index):
        time.sleep(self.wait)
        noise = torch.rand(4) + np.random.rand() + random.random()
        return {"image": x[index] + noise, "label": y[index]}

def test(wait=0.0):
    return [{"image": image, "label": label} for image, label in zip(x[32:], y[32:])]
"""


@pytest.fixture
def plan(workspace: Workspace) -> Workspace:
    keys = 'dataset = "data.py:Noisy"\nheld_out = "data.py:test"\ntarget = "label"'
    workspace.write("stageline.toml", PLAN.replace('source = "data.py:batches"', keys))
    workspace.write("data.py", DATASET)
    return workspace


def options(*sets: str) -> list[str]:
    return ["train", ".", "--json", *(word for each in sets for word in ("--set", each))]


def result(workspace: Workspace, *sets: str) -> tuple[str, float, float]:
    ended = workspace.command(*options(*sets))
    assert ended.returncode == 0, ended.stderr
    return told(ended.stdout)


def told(text: str) -> tuple[str, float, float]:
    found = json.loads(text)
    return found["weights_sha256"], found["loss"], found["metrics"]["accuracy"]


@pytest.mark.slow
def test_readers_in_every_worker_give_the_weights_of_one_process_without_them(plan: Workspace) -> None:
    assert result(plan, "data.num_workers=1") == result(plan, "queues.url=memory://")


def test_a_script_with_a_loader_comes_to_the_weights_of_the_plan_also_from_the_middle(plan: Workspace) -> None:
    result(plan, "queues.url=memory://")
    trained = load_weights(plan.runs()[0])
    names: dict[str, Any] = {"__name__": "data"}
    exec(compile(DATASET, "data.py", "exec"), names)  # noqa: S102  # the text above
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    loss, optimizer = nn.functional.cross_entropy, partial(torch.optim.SGD, lr=0.1)
    with (
        Loader(names["Noisy"](), 6, 0, target="label", num_workers=1) as loader,
        Line(model, cut=[2], loss=loss, optimizer=optimizer, microbatches=3, workers="inline") as line,
    ):
        for x, y in islice(loader.batches(), 4):
            line.step(x, y)
        for x, y in islice(loader.batches(line.position), 2):
            line.step(x, y)
        assert all(torch.equal(tensor, trained[name]) for name, tensor in line.state_dict().items())


def readers_of(worker: psutil.Process) -> list[psutil.Process]:
    """They start with the first batch, soon after the run is said to be running."""
    deadline = monotonic() + PATIENCE
    while len(found := worker.children()) < 2:
        assert monotonic() < deadline
        sleep(0.005)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("reader", [True, False], ids=["a reader", "a worker"])
def test_whatever_is_killed_readers_end_with_their_worker_and_the_weights_stay(plan: Workspace, reader: bool) -> None:
    sets = ("run.steps=300", "recovery.snapshot_every=30")
    train = plan.start(*options(*sets, "data.num_workers=2", "data.options={wait=0.002}"))
    until(train.stderr, "running")
    url = runs.read_broker_url(max(plan.runs(), key=lambda path: path.stat().st_mtime))
    assert url is not None
    with Client(url) as client:
        worker = psutil.Process(client.ask("status", timeout=10)["workers"][0]["pid"])
    first, _ = readers_of(worker)
    (first if reader else worker).kill()
    said, errors = train.communicate()
    assert train.returncode == 0, errors
    assert json.loads(said)["restarts"] == (0 if reader else 1)
    assert told(said) == result(plan, *sets, "queues.url=memory://")
