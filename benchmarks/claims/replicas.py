"""Claim: with two replicas of the stage that is twice as slow as the others, a line is nearly twice as fast.

Each stage has a real layer, and waits as a process does for its GPU, so that the figures show the order of the work and
not how many cores the machine has to spare.
"""

import tempfile
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from benchmarks.measuring.finding import BenchmarkResult, Table
from benchmarks.measuring.rounds import Spread, alternate
from benchmarks.trainers import ours
from benchmarks.workload import Timing, demand_equal_work
from stageline.pipeline.program import Costs, check_schedule
from stageline.pipeline.schedule import make_schedule
from stageline.workers.launch.template import Template

FORWARD, LONGER = 0.004, 0.012  # seconds that the forward of a fast stage waits; a backward waits twice as long
MICROBATCHES, WARM, TIMED = 48, 1, 2
SCHEDULE = "eager-1f1b"  # hides what messages take, which shows where all stages are busy all the time
OVERHEAD = 0.001  # seconds; for the last column


@dataclass(frozen=True, slots=True)
class SlowStage:
    """Which of three stages is slow, and the seconds that the forward of another waits."""

    place: int
    forward: float

    def __str__(self) -> str:
        return f"{('first', 'middle', 'last')[self.place]}, {1000 * self.forward:g} ms"


CASES = (*(SlowStage(place, FORWARD) for place in range(3)), SlowStage(0, LONGER))

PLAN = f"""
[run]
steps = {WARM + TIMED}
[model]
factory = "model.py:build"
options = {{ slow = 1, forward = {FORWARD} }}
cut = [2, 4]
loss = "torch.nn.functional.mse_loss"
[data]
source = "model.py:batches"
batch_size = {MICROBATCHES}
[schedule]
name = "{SCHEDULE}"
microbatches = {MICROBATCHES}
[optimizer]
factory = "torch.optim.SGD"
lr = 0.01
"""

MODEL = """
import time
import torch
from stageline import Rows
from torch import nn

class Wait(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, seconds):
        ctx.seconds = seconds
        time.sleep(seconds)
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        time.sleep(2 * ctx.seconds)
        return gradient, None

class Waits(nn.Module):
    def __init__(self, seconds):
        super().__init__()
        self.seconds = seconds

    def forward(self, x):
        return Wait.apply(x, self.seconds)

def build(slow, forward):
    waits = [Waits(forward * (1 + (stage == slow))) for stage in range(3)]
    return nn.Sequential(*(layer for each in waits for layer in (nn.Linear(16, 16), each)))

def batches(batch_size, seed):
    made = torch.randn(2, batch_size, 16, generator=torch.Generator().manual_seed(seed))
    return Rows(made[0], made[1], batch_size, seed, shuffle=False)
"""

ABOUT = f"""\
Three stages of one linear layer each, one of them twice as slow: a forward waits for {1000 * FORWARD:g} ms, in the slow
stage for twice that, a backward twice as long as the forward; in the last row for {1000 * LONGER:g} ms.
{MICROBATCHES} microbatches, schedule {SCHEDULE}, a worker with one thread for each stage, and for each replica. Of
{WARM + TIMED} steps the last {TIMED} count. Steps per second, as `min / median / max` over the rounds, in which all
take turns; the gain is the median of those within each round, and beside it what the lists of actions give where
nothing but the waits takes time, and where each action takes {1000 * OVERHEAD:g} ms longer."""


def measure(rounds: int) -> BenchmarkResult:
    with tempfile.TemporaryDirectory() as folder, Template() as template:
        config = Path(folder) / "stageline.toml"
        config.write_text(PLAN)
        (config.parent / "model.py").write_text(MODEL)
        names = [(case, replicas) for case in CASES for replicas in (1, 2)]
        timings = alternate({name: partial(_train, template, config, *name) for name in names}, rounds)
    for case in CASES:
        demand_equal_work((str(n), run.loss) for n in names if n[0] == case for run in timings[n])
    rates = {name: Spread(tuple(run.steps_per_second(WARM) for run in runs)) for name, runs in timings.items()}
    rows = tuple((str(case), *_cells(rates, case)) for case in CASES)
    lists = "gain of the lists", f"with {1000 * OVERHEAD:g} ms more"
    columns = ("the slow stage", "1 replica, steps/s", "2 replicas, steps/s", "gain", *lists)
    facts = {f"{case}, {count}": rate.rounds for (case, count), rate in rates.items()}
    return BenchmarkResult("Replicas", ABOUT, (Table("", columns, rows),), {"steps_per_second": facts})


def _train(template: Template, config: Path, case: SlowStage, replicas: int) -> Timing:
    options = f"model.options={{ slow = {case.place}, forward = {case.forward} }}"
    return ours.train_plan(config, [options, f"stage.{case.place}.replicas={replicas}"], template)


def _cells(rates: dict[tuple[SlowStage, int], Spread], case: SlowStage) -> tuple[str, ...]:
    alone, together = rates[case, 1], rates[case, 2]
    steps = [f"{each.low:.3g} / {each.middle:.3g} / {each.high:.3g}" for each in (alone, together)]
    lists = (_span(case, 1, more) / _span(case, 2, more) for more in (0.0, OVERHEAD))
    return *steps, f"{(together / alone).middle:.2f}", *(f"{gain:.2f}" for gain in lists)


def _span(case: SlowStage, replicas: int, overhead: float) -> float:
    """Of a step, in seconds, if each action takes `overhead` longer than it waits."""
    waits = tuple(case.forward * (1 + (stage == case.place)) for stage in range(3))
    forward, half = (tuple(wait + more for wait in waits) for more in (overhead, overhead / 2))
    shares = tuple((1,) * (replicas if stage == case.place else 1) for stage in range(3))
    copies = [(copy,) for copy in range(2 + replicas)]
    schedule = make_schedule(SCHEDULE, copies, MICROBATCHES, shares=shares if replicas > 1 else ())
    return check_schedule(schedule, Costs(forward, half, half, (0.0,) * 3, (0.0,) * 2)).span
