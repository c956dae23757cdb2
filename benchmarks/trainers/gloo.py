"""torch's own pipeline: `torch.distributed.pipelining.Schedule1F1B` between two processes over gloo on loopback.

Shapes are given to it in advance and outputs are not merged, which is the fastest it can be asked to be.
"""

import os
import tempfile
from datetime import timedelta
from functools import partial
from time import perf_counter

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn.functional import mse_loss

from benchmarks.measuring.processes import PATIENCE, together
from benchmarks.workload import MICROBATCHES, STAGES, Timing, Workload, batch, mean_loss, optimizer, stage


def train(workload: Workload) -> Timing:
    with tempfile.TemporaryDirectory() as folder:
        store = os.path.join(folder, "store")
        [(ends, _), (_, losses)] = together(*(partial(_rank, workload, store, rank) for rank in range(STAGES)))
    return Timing(tuple(ends), losses[-1])


def _rank(workload: Workload, store: str, rank: int) -> tuple[list[float], list[float]]:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=STAGES, timeout=timedelta(seconds=PATIENCE)
    )
    try:
        return _train(workload, rank)
    finally:
        dist.destroy_process_group()


def _train(workload: Workload, rank: int) -> tuple[list[float], list[float]]:
    model = stage(workload, rank)
    sgd = optimizer(model)
    inputs, targets = batch(workload)
    schedule = _schedule(model, rank, inputs)
    ends, losses = [], []
    for _ in range(workload.steps):
        if rank == 0:
            schedule.step(inputs, return_outputs=False)
        else:
            step: list[Tensor] = []
            schedule.step(target=targets, losses=step, return_outputs=False)
            losses.append(mean_loss(step))
        sgd.step()
        sgd.zero_grad()
        ends.append(perf_counter())
    return ends, losses


def _schedule(model: torch.nn.Module, rank: int, inputs: Tensor) -> Schedule1F1B:
    example = inputs.tensor_split(MICROBATCHES)[0].detach().clone()
    result = example.clone().requires_grad_()
    received = example.requires_grad_(rank > 0)
    part = PipelineStage(model, rank, STAGES, torch.device("cpu"), input_args=(received,), output_args=(result,))
    return Schedule1F1B(part, MICROBATCHES, loss_fn=mse_loss)
