"""Claim: with two reader processes, a line does not wait for its data, though a sample takes 5 ms to draw.

One plan, whose dataset augments each sample for 5 ms, with `data.num_workers` 0 and 2. The layers wait too, as a
process does for its GPU, so that the figures show the waiting, and not how many cores the machine has to spare.

    0F0 | 0F1 0F2 ...        the first forward of a step draws its batch: what it takes longer than the
    ^ ^                      others is the wait for data
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median

from benchmarks.measuring.finding import BenchmarkResult, Table
from benchmarks.measuring.rounds import Spread, alternate
from stageline.pipeline.plan import read_plan
from stageline.pipeline.program import Timed
from stageline.pipeline.schedule import Kind, make_schedule
from stageline.workers.runs.records import measured, open_store

STEPS, WARM = 60, 20
ROWS, MICROBATCHES = 16, 8

PLAN = f"""
[run]
steps = {STEPS}
[model]
factory = "model.py:build"
cut = [2]
loss = "torch.nn.functional.mse_loss"
[data]
dataset = "data.py:Augmented"
batch_size = {ROWS}
[schedule]
microbatches = {MICROBATCHES}
[optimizer]
factory = "torch.optim.SGD"
lr = 0.01
"""

MODEL = """
import time
from torch import nn

class Waits(nn.Module):
    def forward(self, x):
        time.sleep(0.006)
        return x

def build():
    return nn.Sequential(Waits(), nn.Linear(64, 64), Waits(), nn.Linear(64, 1))
"""

DATA = """
import time
import torch
from torch.utils.data import Dataset

def computes(seconds):
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass

AUGMENT = {"waits": time.sleep, "computes": computes}

class Augmented(Dataset):
    def __init__(self, kind):
        self.augment = AUGMENT[kind]

    def __len__(self):
        return 640

    def __getitem__(self, index):
        self.augment(0.005)
        return torch.randn(64), torch.zeros(1)
"""

ABOUT = f"""\
{ROWS} rows a batch, {MICROBATCHES} microbatches, two stages whose forward waits for 6 ms, {STEPS} steps
of which the last {STEPS - WARM} count. A sample takes 5 ms: it waits, as for a disk, or it computes. The
worker of either stage draws: of computing, that is 160 ms of a processor a step. Medians over the rounds. The wait for
data is what the first forward of a step takes longer than the median of the others. Idle: the share of the time in
which the last stage's worker runs no action. Load: the machine's one-minute average at the end."""


@dataclass(frozen=True, slots=True)
class DataTiming:
    """Of the steps that count: steps per second, seconds a step of waiting for data at each end, share of idle time."""

    rate: float
    first: float
    last: float
    idle: float


def measure(rounds: int) -> BenchmarkResult:
    names = {f"{kind} 5 ms, num_workers = {n}": (kind, n) for kind in ("waits", "computes") for n in (0, 2)}
    found = alternate({name: partial(_train, *each) for name, each in names.items()}, rounds)
    rows = tuple((name, *_cells(timings)) for name, timings in found.items())
    columns = ("a sample", "steps/s", "wait at stage 0, ms", "wait at the last, ms", "idle")
    title = f"5 ms a sample; load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores"
    facts = {name: [[t.rate, t.first, t.last, t.idle] for t in timings] for name, timings in found.items()}
    return BenchmarkResult("Data ahead", ABOUT, (Table(title, columns, rows),), {"data": facts})


def _cells(timings: Sequence[DataTiming]) -> tuple[str, str, str, str]:
    def middle(name: str) -> float:
        return Spread(tuple(getattr(timing, name) for timing in timings)).middle

    return (
        f"{middle('rate'):.2f}",
        f"{1000 * middle('first'):.1f}",
        f"{1000 * middle('last'):.1f}",
        f"{100 * middle('idle'):.0f} %",
    )


def _train(kind: str, num_workers: int) -> DataTiming:
    with tempfile.TemporaryDirectory(prefix="stageline-data-") as name:
        folder = Path(name)
        for file, text in (("stageline.toml", PLAN), ("model.py", MODEL), ("data.py", DATA)):
            (folder / file).write_text(text)
        sets = [f"data.num_workers={num_workers}", f"data.options={{kind='{kind}'}}", f"run.dir={folder / 'runs'}"]
        options = [word for each in sets for word in ("--set", each)]
        command = [sys.executable, "-P", "-m", "stageline", "train", name, "--json", *options]
        ended = subprocess.run(command, check=True, stdout=subprocess.PIPE)
        return _timing(_timed(folder, sets, json.loads(ended.stdout)["run"]))


def _timed(folder: Path, sets: Sequence[str], run: str) -> list[Timed]:
    plan = read_plan(folder, sets=sets)
    schedule = make_schedule(plan.schedule.name, plan.placement, MICROBATCHES)
    with closing(open_store(plan, run)) as store:
        return measured(store, schedule, range(WARM, STEPS))


def _timing(timed: Sequence[Timed]) -> DataTiming:
    span = max(each.end for each in timed) - min(each.start for each in timed)
    busy = sum(each.end - each.start for each in timed if each.action.stage == 1)
    return DataTiming((STEPS - WARM) / span, _wait(timed, 0), _wait(timed, 1), 1 - busy / span)


def _wait(timed: Sequence[Timed], stage: int) -> float:
    """Seconds a step."""
    forwards = [each for each in timed if each.action.stage == stage and each.action.kind is Kind.FORWARD]
    usual = median(each.end - each.start for each in forwards if each.action.microbatch)
    waits = [each.end - each.start - usual for each in forwards if not each.action.microbatch]
    return sum(waits) / len(waits)
