"""Gain of zero bubble schedules over 1F1B, in stageline and in torch.

Each schedule runs in stageline and in `torch.distributed.pipelining`: the same lists of actions, in two runtimes.
"""

import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from torch.distributed.pipelining import (
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)

from benchmarks.measuring.finding import BenchmarkResult, Table
from benchmarks.measuring.rounds import Spread, alternate
from benchmarks.trainers import gloo, ours
from benchmarks.workload import MICROBATCHES, Timing, Workload, demand_equal_work
from stageline.pipeline.program import Costs, check_schedule
from stageline.pipeline.schedule import make_schedule
from stageline.workers.launch.template import Template

WORKLOADS = (Workload(width=256, layers=2, sequence=64, rows=4, warm=1, timed=6),)  # layers for two stages a process
LOOPED: gloo.Placement = ((0, 2), (1, 3))
V_SHAPED: gloo.Placement = ((0, 3), (1, 2))
BASE = "1F1B"


@dataclass(frozen=True, slots=True)
class TwoRuntimes:
    """A schedule as stageline names it, and torch's class of it, with the stages of each process."""

    ours: str
    theirs: gloo.Kind
    placement: gloo.Placement = gloo.LINE


LISTED = "csv"  # of a file that torch has written, since stageline's catalogue does not have it
SCHEDULES: Mapping[str, TwoRuntimes] = {
    BASE: TwoRuntimes("1f1b", Schedule1F1B),
    "ZB-H1": TwoRuntimes("zb-h1", ScheduleInterleavedZeroBubble),
    "interleaved zero bubble": TwoRuntimes(LISTED, ScheduleInterleavedZeroBubble, LOOPED),
    "ZB-V": TwoRuntimes("zb-v", ScheduleZBVZeroBubble, V_SHAPED),
    "DualPipeV": TwoRuntimes("dualpipe-v", ScheduleDualPipeV, V_SHAPED),
}

ABOUT = f"""\
Two processes with one torch thread each on one machine; transformer encoder layers (pre-norm, no dropout), mean squared
error, SGD, {MICROBATCHES} microbatches a step. 1F1B and ZB-H1 have a stage for each process, the others two of half
the size. stageline: `1f1b`, `zb-h1`, `zb-v`, `dualpipe-v`, and for interleaved zero bubble `csv` with the file that
torch writes of it; messages over `shm://`, recovery off. torch: `Schedule1F1B`, `ScheduleInterleavedZeroBubble` (ZB-H1
with one stage a process), `ScheduleZBVZeroBubble` and `ScheduleDualPipeV` over gloo, with shapes given in advance. All
start from the same weights and must end with the same loss. They take turns; rates are steps per second as `min /
median / max` over the rounds, ratios are medians of those within each round. The last column has what the lists of
actions gain on those of 1F1B if a forward and both halves of a backward take equally long and messages take no time."""


def measure(rounds: int) -> BenchmarkResult:
    with tempfile.TemporaryDirectory() as folder, Template() as template:
        file = Path(folder) / "interleaved.csv"
        gloo.write_lists(ScheduleInterleavedZeroBubble, LOOPED, file)
        gains = {name: _span(SCHEDULES[BASE], file) / _span(each, file) for name, each in SCHEDULES.items()}
        rates = {workload: _rates(workload, rounds, file, template) for workload in WORKLOADS}
    tables = tuple(_table(workload, by_contestant, gains) for workload, by_contestant in rates.items())
    return BenchmarkResult("Zero bubble", ABOUT, tables, {"zero_bubble": [_facts(*item) for item in rates.items()]})


def _rates(workload: Workload, rounds: int, file: Path, template: Template) -> dict[tuple[str, str], Spread]:
    """Of each schedule in each runtime."""
    turns: dict[tuple[str, str], Callable[[], Timing]] = {}
    for name, each in SCHEDULES.items():
        sets = [*ours.settings(workload), *_settings(each, file)]
        turns[name, "stageline"] = partial(ours.train_plan, ours.PLAN, sets, template)
        turns[name, "torch"] = partial(gloo.train, workload, each.theirs, each.placement)
    timings = alternate(turns, rounds)
    demand_equal_work((f"{', '.join(name)}: {workload}", run.loss) for name, runs in timings.items() for run in runs)
    return {name: Spread(tuple(t.steps_per_second(workload.warm) for t in runs)) for name, runs in timings.items()}


def _settings(schedule: TwoRuntimes, file: Path) -> list[str]:
    """Of the plan, beside the workload's."""
    return [
        f"schedule.name={schedule.ours}",
        *([f"schedule.file={file}"] if schedule.ours == LISTED else []),
        f"model.stages={sum(map(len, schedule.placement))}",
        *(f"workers.{worker}.stages={list(stages)}" for worker, stages in enumerate(schedule.placement)),
    ]


def _span(schedule: TwoRuntimes, file: Path) -> float:
    """Of a step, in forwards of a process's layers."""
    rows = tuple(file.read_text().splitlines()) if schedule.ours == LISTED else None
    made = make_schedule(schedule.ours, schedule.placement, MICROBATCHES, rows=rows)
    stages = sum(map(len, schedule.placement))
    part = len(schedule.placement) / stages
    return check_schedule(made, Costs.even(stages, forward=part, backward=2 * part)).span


def _table(workload: Workload, rates: Mapping[tuple[str, str], Spread], gains: Mapping[str, float]) -> Table:
    columns = (
        *("schedule", "stageline, steps/s", "torch, steps/s", "stageline to torch"),
        *("stageline to its 1F1B", "torch to its 1F1B", "of the lists"),
    )
    return Table(str(workload), columns, tuple((name, *_cells(rates, name), f"{gains[name]:.2f}") for name in gains))


def _cells(rates: Mapping[tuple[str, str], Spread], name: str) -> tuple[str, ...]:
    mine, theirs = rates[name, "stageline"], rates[name, "torch"]
    compared = mine / theirs, mine / rates[BASE, "stageline"], theirs / rates[BASE, "torch"]
    steps = [f"{rate.low:.3g} / {rate.middle:.3g} / {rate.high:.3g}" for rate in (mine, theirs)]
    return *steps, *(f"{ratio.middle:.2f}" for ratio in compared)


def _facts(workload: Workload, rates: Mapping[tuple[str, str], Spread]) -> dict[str, object]:
    steps = {f"{name}, {runtime}": rate.rounds for (name, runtime), rate in rates.items()}
    return {"workload": asdict(workload), "steps_per_second": steps}
