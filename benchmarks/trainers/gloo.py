"""torch's own pipelines: the schedules of `torch.distributed.pipelining`, between two processes over gloo on loopback.

Shapes are given to them in advance and outputs are not merged, which is the fastest they can be asked to be.
"""

import os
import tempfile
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.pipelining.schedules import (
    PipelineScheduleMulti,
    PipelineScheduleSingle,
    _PipelineScheduleRuntime,
)
from torch.nn.functional import mse_loss

from benchmarks.measuring.processes import PATIENCE, together
from benchmarks.workload import MICROBATCHES, Timing, Workload, batch, mean_loss, optimizer, stage

R = TypeVar("R")

Placement = tuple[tuple[int, ...], ...]  # the stages of each process
Kind = type[PipelineScheduleSingle] | type[PipelineScheduleMulti]

LINE: Placement = ((0,), (1,))


def train(workload: Workload, kind: Kind = Schedule1F1B, placement: Placement = LINE) -> Timing:
    """All stages of `placement` have equally many of the workload's layers."""
    ranks = _in_group(placement, partial(_train, workload, kind, placement))
    [losses] = [losses for _, losses in ranks if losses]
    return Timing(tuple(ranks[0][0]), losses[-1])


def write_lists(kind: type[_PipelineScheduleRuntime], placement: Placement, file: Path) -> None:
    """Have torch write the actions of each process in a step into a file in its format `compute_only`."""
    _in_group(placement, partial(_write_lists, kind, placement, file))


def _in_group(placement: Placement, work: Callable[[int], R]) -> list[R]:
    """Results of `work` in each process of a group, to which it gives the process's rank."""
    with tempfile.TemporaryDirectory() as folder:
        store = os.path.join(folder, "store")
        return together(*(partial(_rank, store, rank, len(placement), work) for rank in range(len(placement))))


def _rank(store: str, rank: int, ranks: int, work: Callable[[int], R]) -> R:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=ranks, timeout=timedelta(seconds=PATIENCE)
    )
    try:
        return work(rank)
    finally:
        dist.destroy_process_group()


def _train(workload: Workload, kind: Kind, placement: Placement, rank: int) -> tuple[list[float], list[float]]:
    """When each step ended here, and its loss, if the last stage is here."""
    stages = sum(map(len, placement))
    models = {index: stage(workload, index, stages) for index in placement[rank]}
    sgd = optimizer(nn.ModuleList(models.values()))
    inputs, targets = batch(workload)
    schedule = _schedule(kind, [_part(model, index, stages, inputs) for index, model in models.items()])
    fed = (inputs,) if 0 in models else ()
    compared = targets if stages - 1 in models else None
    ends, losses = [], []
    for _ in range(workload.steps):
        step: list[Tensor] = []
        schedule.step(*fed, target=compared, losses=step, return_outputs=False)
        if compared is not None:
            losses.append(mean_loss(step))
        sgd.step()
        sgd.zero_grad()
        ends.append(perf_counter())
    return ends, losses


def _part(model: nn.Module, index: int, stages: int, inputs: Tensor) -> PipelineStage:
    example = inputs.tensor_split(MICROBATCHES)[0].detach().clone()
    result = example.clone().requires_grad_()
    received = example.requires_grad_(index > 0)
    return PipelineStage(model, index, stages, torch.device("cpu"), input_args=(received,), output_args=(result,))


def _schedule(kind: Kind, parts: Sequence[PipelineStage]) -> PipelineScheduleSingle | PipelineScheduleMulti:
    if issubclass(kind, PipelineScheduleSingle):
        [part] = parts
        return kind(part, MICROBATCHES, loss_fn=mse_loss)
    return kind(list(parts), MICROBATCHES, loss_fn=mse_loss)


def _write_lists(kind: type[_PipelineScheduleRuntime], placement: Placement, file: Path, rank: int) -> None:
    stages = sum(map(len, placement))
    parts = [PipelineStage(nn.Identity(), index, stages, torch.device("cpu")) for index in placement[rank]]
    schedule = kind(parts, MICROBATCHES, loss_fn=mse_loss)
    if rank == 0:  # each process has the lists of all
        schedule._dump_csv(str(file), format="compute_only")
