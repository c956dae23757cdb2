"""Runs whose plan names a dataset: readers change nothing, and end with their workers."""

import json

import pytest

from support.workspace import PLAN, Workspace

DATASET = """
import random

import numpy as np
import torch
from torch.utils.data import Dataset, TensorDataset

x = torch.randn(40, 4, generator=torch.Generator().manual_seed(1))
y = (x.sum(1) > 0).long()

class Noisy(Dataset):
    def __len__(self):
        return 32

    def __getitem__(self, index):
        noise = torch.rand(4) + np.random.rand() + random.random()
        return {"image": x[index] + noise, "label": y[index]}

def test():
    return [{"image": image, "label": label} for image, label in zip(x[32:], y[32:])]
"""


@pytest.fixture
def plan(workspace: Workspace) -> Workspace:
    keys = 'dataset = "data.py:Noisy"\nheld_out = "data.py:test"\ntarget = "label"'
    workspace.write("stageline.toml", PLAN.replace('source = "data.py:batches"', keys))
    workspace.write("data.py", DATASET)
    return workspace


def result(workspace: Workspace, *sets: str) -> tuple[str, float, float]:
    options = [word for each in sets for word in ("--set", each)]
    ended = workspace.command("train", ".", "--json", *options)
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout)
    return found["weights_sha256"], found["loss"], found["metrics"]["accuracy"]


def test_readers_in_every_worker_give_the_weights_of_one_process_without_them(plan: Workspace) -> None:
    assert result(plan, "data.num_workers=1") == result(plan, "queues.url=memory://")
