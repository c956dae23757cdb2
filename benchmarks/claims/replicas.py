"""Claim: with two replicas of the stage that is twice as slow as the others, a line is nearly twice as fast.

Each stage has a real layer, and waits as a process does for its GPU, so that the figures show the order of the work and
not how many cores the machine has to spare.
"""

import tempfile
from functools import partial
from pathlib import Path

from benchmarks.measuring.finding import BenchmarkResult, Table
from benchmarks.measuring.rounds import Spread, alternate
from benchmarks.trainers import ours
from benchmarks.workload import Timing, demand_equal_work
from stageline.pipeline.schedule import make_schedule
from stageline.pipeline.schedule.check import Costs, check_schedule
from stageline.workers.launch.template import Template

FORWARD = 0.004  # seconds that the forward of a fast stage waits; a backward waits twice as long
MICROBATCHES, WARM, TIMED = 48, 1, 2
SCHEDULE = "eager-1f1b"  # hides what messages take, which shows where all stages are busy all the time
PLACES = ("first", "middle", "last")

PLAN = f"""
[run]
steps = {WARM + TIMED}
[model]
factory = "model.py:build"
options = {{ slow = 1 }}
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

MODEL = f"""
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

def build(slow):
    waits = [Waits({FORWARD} * (1 + (stage == slow))) for stage in range(3)]
    return nn.Sequential(*(layer for each in waits for layer in (nn.Linear(16, 16), each)))

def batches(batch_size, seed):
    made = torch.randn(2, batch_size, 16, generator=torch.Generator().manual_seed(seed))
    return Rows(made[0], made[1], batch_size, seed, shuffle=False)
"""

ABOUT = f"""\
Three stages of one linear layer each, one of them twice as slow: a forward waits for {1000 * FORWARD:g} ms, in the slow
stage for {2000 * FORWARD:g} ms, a backward twice as long. {MICROBATCHES} microbatches, schedule {SCHEDULE}, a worker
with one thread for each stage, and for each replica. Of {WARM + TIMED} steps the last {TIMED} count. Steps per second,
as `min / median / max` over the rounds, in which all take turns; the gain is the median of those within each round, and
beside it what the lists of actions give where nothing but the waits takes time."""


def measure(rounds: int) -> BenchmarkResult:
    with tempfile.TemporaryDirectory() as folder, Template() as template:
        config = Path(folder) / "stageline.toml"
        config.write_text(PLAN)
        (config.parent / "model.py").write_text(MODEL)
        names = [(place, replicas) for place in range(3) for replicas in (1, 2)]
        timings = alternate({name: partial(_train, template, config, *name) for name in names}, rounds)
    for place in range(3):
        demand_equal_work((str(n), run.loss) for n in names if n[0] == place for run in timings[n])
    rates = {name: Spread(tuple(run.steps_per_second(WARM) for run in runs)) for name, runs in timings.items()}
    rows = tuple((place, *_cells(rates, number)) for number, place in enumerate(PLACES))
    columns = ("the slow stage", "1 replica, steps/s", "2 replicas, steps/s", "gain", "gain of the lists")
    facts = {f"{PLACES[place]}, {count}": rate.rounds for (place, count), rate in rates.items()}
    return BenchmarkResult("Replicas", ABOUT, (Table("", columns, rows),), {"steps_per_second": facts})


def _train(template: Template, config: Path, place: int, replicas: int) -> Timing:
    sets = [f"model.options={{ slow = {place} }}", f"stage.{place}.replicas={replicas}"]
    return ours.train_plan(config, sets, template)


def _cells(rates: dict[tuple[int, int], Spread], place: int) -> tuple[str, ...]:
    alone, together = rates[place, 1], rates[place, 2]
    steps = [f"{each.low:.3g} / {each.middle:.3g} / {each.high:.3g}" for each in (alone, together)]
    return *steps, f"{(together / alone).middle:.2f}", f"{_span(place, 1) / _span(place, 2):.2f}"


def _span(place: int, replicas: int) -> float:
    """Of a step, in forwards of a fast stage."""
    times = tuple(2.0 if stage == place else 1.0 for stage in range(3))
    shares = tuple((1,) * (replicas if stage == place else 1) for stage in range(3))
    copies = [(copy,) for copy in range(2 + replicas)]
    schedule = make_schedule(SCHEDULE, copies, MICROBATCHES, shares=shares if replicas > 1 else ())
    return check_schedule(schedule, Costs(times, times, times, (0.0,) * 3, (0.0,) * 2)).span
