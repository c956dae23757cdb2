"""The same workload from a user's script: a `Line` on two processes, whose batches and calls come from the script."""

import tempfile
from functools import partial
from pathlib import Path

import torch
from torch import nn

from benchmarks.measuring.processes import together
from benchmarks.workload import LEARNING_RATE, MICROBATCHES, SEED, STAGES, Timing, Workload, batch, build
from stageline import Line, make_schedule
from stageline.workers.runs.folder import newest_in

from .ours import TrainerFailed, ends_in

SETTINGS = {"recovery.restarts": 0, "recovery.snapshot_every": 0}


def train(workload: Workload) -> Timing:
    """In a process of its own, which is the script."""
    (timing,) = together(partial(_script, workload))
    return timing


def _script(workload: Workload) -> Timing:
    x, y = batch(workload)
    with tempfile.TemporaryDirectory() as folder:
        with Line(
            partial(build, workload.width, workload.layers),
            cut=[workload.layers],
            loss=nn.functional.mse_loss,
            optimizer=partial(torch.optim.SGD, lr=LEARNING_RATE),
            microbatches=MICROBATCHES,
            seed=SEED,
            folder=folder,
            settings=SETTINGS,
        ) as line:
            losses = [line.step(x, y) for _ in range(workload.steps)]
        run = newest_in(Path(folder))
        if run is None:
            raise TrainerFailed(f"{workload}: no run is in {folder}")
        schedule = make_schedule("1f1b", [(stage,) for stage in range(STAGES)], MICROBATCHES)
        return Timing(ends_in(run, schedule, workload.steps), float(losses[-1]))
