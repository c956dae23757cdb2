"""Claim: where one layer of many is trained, only what that needs is computed and sent.

80 layers in 4 stages on 2 workers, of which all are trained, or one in the middle: steps per second, what crosses from
worker to worker, and what stages hold for their backwards; beside the unsplit model, frozen likewise. With a prefix
cache, all steps but the first are as fast as the layers after the frozen ones alone.
"""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from benchmarks.measuring.finding import BenchmarkResult, Table
from benchmarks.measuring.rounds import Spread, alternate
from benchmarks.trainers import ours, unsplit
from benchmarks.workload import MICROBATCHES, STAGES, Timing, Workload, demand_equal_work
from stageline.pipeline.plan import Plan, read_plan
from stageline.workers.extras.preflight.trial import estimate
from stageline.workers.extras.preflight.trial_result import Estimate

LAYERS, MIDDLE = 80, 40
WORKLOAD = Workload(width=64, layers=LAYERS // STAGES, sequence=16, rows=4, warm=4, timed=12)
ALL, ONE = ("*",), (f"{MIDDLE}.*",)
PLACED = (
    f"model.cut={[LAYERS * stage // 4 for stage in range(1, 4)]}",
    "workers.0.stages=[0, 1]",
    "workers.1.stages=[2, 3]",
)

ABOUT = f"""\
{LAYERS} transformer encoder layers, {WORKLOAD.rows} rows a microbatch, {MICROBATCHES} microbatches a step, schedule
1f1b, in four stages on two workers with one torch thread each on one machine: stages 0 and 1 on the first, 2 and 3 on
the second. Trained is all, or layer {MIDDLE}, the first of stage 2. The unsplit model is trained in one process with
one thread. Trainers of the same parameters must end with the same loss. They take turns; rates are steps per second as
`min / median / max` over the rounds, the ratio is to the unsplit model with the same parameters trained, the median of
those within each round. With the prefix cache, an epoch is one step, which is not among those that are timed; its
ratio is to the layers from {MIDDLE} on alone, trained in one process with one thread on what the others gave once.
Messages and bytes are those that cross from worker to worker in a step, held is what all stages keep for backwards at
most: both as `stageline plan` tells them."""


@dataclass(frozen=True, slots=True)
class Contestant:
    """How parameters that match `trainable` are trained; `sets`: of its plan, None without one. Its rate is compared
    with that of the contestant called `beside`."""

    train: Callable[[], Timing]
    trainable: Sequence[str]
    beside: str
    sets: Sequence[str] | None = None

    @property
    def planned(self) -> Estimate | None:
        return None if self.sets is None else estimate(_plan(self.sets))


UNSPLIT = {ALL: "unsplit, all trained", ONE: "unsplit, one layer trained"}
SUFFIX = f"layers {MIDDLE} on alone"


def _unsplit(trainable: Sequence[str]) -> Contestant:
    train = partial(unsplit.train, WORKLOAD, threads=1, trainable=trainable)
    return Contestant(train, trainable, UNSPLIT[tuple(trainable)])


def _suffix() -> Contestant:
    return Contestant(partial(unsplit.train_suffix, WORKLOAD, MIDDLE, ONE), ONE, SUFFIX)


def _ours(trainable: Sequence[str], *sets: str, beside: str | None = None) -> Contestant:
    sets = (*PLACED, f"model.trainable={list(trainable)}", *sets)
    return Contestant(partial(ours.train, WORKLOAD, sets), trainable, beside or UNSPLIT[tuple(trainable)], sets)


CONTESTANTS = {
    UNSPLIT[ALL]: _unsplit(ALL),
    "stageline, all trained": _ours(ALL),
    UNSPLIT[ONE]: _unsplit(ONE),
    "stageline, one layer trained": _ours(ONE),
    SUFFIX: _suffix(),
    "stageline, one layer trained, prefix cache": _ours(ONE, "model.prefix_cache=true", beside=SUFFIX),
}


def measure(rounds: int) -> BenchmarkResult:
    timings = alternate({name: each.train for name, each in CONTESTANTS.items()}, rounds)
    for trainable in UNSPLIT:
        same = (name for name, each in CONTESTANTS.items() if each.trainable == trainable)
        demand_equal_work((name, run.loss) for name in same for run in timings[name])
    rates = {name: Spread(tuple(run.steps_per_second(WORKLOAD.warm) for run in runs)) for name, runs in timings.items()}
    rows = tuple(
        (
            name,
            f"{rates[name].low:.3g} / {rates[name].middle:.3g} / {rates[name].high:.3g}",
            f"{(rates[name] / rates[each.beside]).middle:.2f}",
            *_planned(each.planned, cached=each.beside == SUFFIX),
        )
        for name, each in CONTESTANTS.items()
    )
    columns = ("", "steps/s", "ratio", "messages/step", "KiB/step", "held, MiB")
    facts = {"steps_per_second": {name: rate.rounds for name, rate in rates.items()}}
    return BenchmarkResult("Freezing", ABOUT, (Table(f"width {WORKLOAD.width}", columns, rows),), {"freezing": facts})


def _planned(found: Estimate | None, *, cached: bool) -> tuple[str, str, str]:
    if found is None:
        return "", "", ""
    worker = {stage.stage: stage.worker for stage in found.stages}
    crossing = [queue.message for queue in found.queues if worker[queue.producer] != worker[queue.consumer]]
    held = sum(stage.bytes["activations"] for stage in found.stages)
    return (
        "1" if cached else str(len(crossing) * MICROBATCHES),  # that the step is over
        "0" if cached else f"{sum(crossing) * MICROBATCHES / 2**10:.0f}",
        f"{held / 2**20:.1f}",
    )


def _plan(sets: Sequence[str]) -> Plan:
    return read_plan(ours.PLAN, sets=[*ours.settings(WORKLOAD), *sets], environment=os.environ)
