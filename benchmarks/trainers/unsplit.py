"""The unsplit model in one process, gradients accumulated over the same microbatches."""

from collections.abc import Sequence
from fnmatch import fnmatchcase
from functools import partial
from time import perf_counter

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from benchmarks.measuring.processes import together
from benchmarks.workload import MICROBATCHES, Timing, Workload, batch, layers, mean_loss, optimizer, share


def train(workload: Workload, threads: int, trainable: Sequence[str] = ("*",)) -> Timing:
    """Only parameters whose names match a pattern of `trainable` are trained."""
    [timing] = together(partial(_run, workload, threads, trainable))
    return timing


def train_suffix(workload: Workload, first: int, trainable: Sequence[str]) -> Timing:
    """Only the layers from number `first` on, in one process with one thread, on what the others gave once."""
    [timing] = together(partial(_run, workload, 1, trainable, first))
    return timing


def train_beside_another(workload: Workload) -> Timing:
    """One of two processes that do the same at once, with one thread each."""
    run = partial(_run, workload, 1, ("*",))
    return together(run, run)[0]


def _run(workload: Workload, threads: int, trainable: Sequence[str], first: int = 0) -> Timing:
    torch.set_num_threads(threads)
    model = nn.Sequential(*layers(workload))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(any(fnmatchcase(name, pattern) for pattern in trainable))
    sgd = optimizer(model)
    inputs, targets = batch(workload)
    if first:
        with torch.no_grad():
            inputs = torch.cat([model[:first](each) for each in inputs.tensor_split(MICROBATCHES)])
        model = model[first:]
    ends = []
    for _ in range(workload.steps):
        losses = _accumulate(model, inputs, targets)
        sgd.step()
        sgd.zero_grad()
        loss = mean_loss(losses)
        ends.append(perf_counter())
    return Timing(tuple(ends), loss)


def _accumulate(model: nn.Module, inputs: Tensor, targets: Tensor) -> list[Tensor]:
    losses = []
    weight = share()
    for x, y in zip(inputs.tensor_split(MICROBATCHES), targets.tensor_split(MICROBATCHES), strict=True):
        loss = mse_loss(model(x), y)
        torch.autograd.backward(loss, weight)
        losses.append(loss.detach())
    return losses
