"""Claim: evaluation between steps costs what it computes: the pipeline goes on, and nothing waits for a round."""

from dataclasses import replace
from functools import partial

from benchmarks.measuring.finding import BenchmarkResult, Table
from benchmarks.measuring.rounds import Spread, alternate
from benchmarks.trainers import ours
from benchmarks.workload import MICROBATCHES, WORKLOADS

EVERY = 10  # steps
BATCHES = 4  # of the rows held out, in each round
BETWEEN, AT_THE_END, NONE = f"every {EVERY} steps", "as many batches after the last step", "no evaluation"

ABOUT = """\
{steps} steps of the second workload above; after every {every}, {batches} batches of rows that are held out are
evaluated, the loss alone. Beside it, a run that evaluates as many batches in one round after its last step, where
nothing else is computed meanwhile, and one that does not evaluate. Seconds are those from the start of the processes
to the end of the run, as `min / median / max` over the rounds, in which all take turns; the ratio is the median of
those within each round."""


def measure(rounds: int) -> BenchmarkResult:
    workload = replace(WORKLOADS[1], warm=0, timed=800)
    batch, of_round = MICROBATCHES * workload.rows, f"evaluation.every={EVERY}"
    count = workload.steps // EVERY * BATCHES
    sets = {
        BETWEEN: [_held_out(workload.width, workload.sequence, BATCHES * batch), of_round],
        AT_THE_END: [_held_out(workload.width, workload.sequence, count * batch), f"evaluation.every={workload.steps}"],
        NONE: [],
    }
    runs = alternate({name: partial(ours.train, workload, each) for name, each in sets.items()}, rounds)
    took = {name: Spread(tuple(run.seconds for run in each)) for name, each in runs.items()}
    rows = tuple(
        (name, f"{each.low:.3g} / {each.middle:.3g} / {each.high:.3g}", f"{(each / took[AT_THE_END]).middle:.3f}")
        for name, each in took.items()
    )
    about = ABOUT.format(steps=workload.steps, every=EVERY, batches=BATCHES)
    facts = {"seconds": {name: each.rounds for name, each in took.items()}}
    table = Table(str(workload), ("evaluation", "seconds", "ratio"), rows)
    return BenchmarkResult("Evaluation", about, (table,), {"evaluation": facts})


def _held_out(width: int, sequence: int, rows: int) -> str:
    return f"data.options={{ width = {width}, sequence = {sequence}, held_out = {rows} }}"
