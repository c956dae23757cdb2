"""Pays torch's one-time start-up costs before the first step."""

from contextlib import suppress

import torch
from torch import nn

from stageline.pipeline.plan import Plan


def warm_up(plan: Plan, worker: int | None) -> None:
    """Prepares this process to compute as `worker` of the plan, or as any.

    The first step of the first optimizer loads torch's compiler, which takes seconds; the first forward and backward
    on a device start its libraries. A device that this machine lacks is skipped.
    """
    mine = plan.workers if worker is None else plan.workers[worker : worker + 1]
    torch.set_num_threads(mine[0].threads if mine else 1)
    for device in sorted({each.device for each in mine}):
        with suppress(RuntimeError, AssertionError):  # torch asserts that it was built for the device
            warm_up_device(device)


def warm_up_device(device: str) -> None:
    """One step of a small layer there."""
    layer = nn.Linear(8, 8, device=device)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1, momentum=0.9)
    layer(torch.zeros(2, 8, device=device)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
