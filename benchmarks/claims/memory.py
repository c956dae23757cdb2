"""Claim: `stageline plan` tells how much memory each worker will take, and what is saved where stages keep less."""

import os

from benchmarks.measuring.finding import BenchmarkResult, Table
from benchmarks.trainers.ours import PLAN
from benchmarks.trainers.worker_memory import MemoryRun, train_and_watch
from stageline.pipeline.plan import Plan, read_plan
from stageline.workers.extras.preflight.memory_choice import chosen_memory
from stageline.workers.extras.preflight.trial import estimate
from stageline.workers.extras.preflight.trial_result import WorkerEstimate

WIDTH, LAYERS, SEQUENCE, ROWS, MICROBATCHES, STEPS = 1024, 3, 64, 4, 4, 4
SETS = (
    f"run.steps={STEPS}",
    f"model.options={{ width = {WIDTH}, layers = {LAYERS} }}",
    f"data.options={{ width = {WIDTH}, sequence = {SEQUENCE} }}",
    f"data.batch_size={MICROBATCHES * ROWS}",
    f"schedule.microbatches={MICROBATCHES}",
    "schedule.name=gpipe",
    "optimizer.factory=torch.optim.AdamW",
    "recovery.restarts=1",
    "recovery.snapshot_every=1",
)
TIGHT = ("memory.limit=8GiB", "memory.tight=[0, 1]")
CASES = {
    "plain": (),
    'recompute = "stage"': ('memory.recompute="stage"',),
    f'recompute = ["[0-{2 * LAYERS - 1}]"]': (f'memory.recompute=["[0-{2 * LAYERS - 1}]"]',),
    'offload = ["activations"]': ('memory.offload=["activations"]',),
    'offload = ["weights"]': ('memory.offload=["weights"]',),
    'offload = ["optimizer"]': ('memory.offload=["optimizer"]',),
    "offload = all three": ('memory.offload=["activations", "weights", "optimizer"]',),
    "first two layers frozen": ('model.trainable=["[!01].*"]',),
    "plain, a limit of 2 GiB": ("memory.limit=2GiB",),
    "plain, a limit of 1.1 GiB": ("memory.limit=1126MiB",),
    "plain, no limit": (),
    "plain, no limit, no snapshots": ("recovery.restarts=0", "recovery.snapshot_every=0"),
    "first two layers frozen, no limit": ('model.trainable=["[!01].*"]',),
    "small": (
        "model.options={ width = 128, layers = 3 }",
        f"data.options={{ width = 128, sequence = {SEQUENCE} }}",
    ),
}

ABOUT = f"""\
{2 * LAYERS} transformer encoder layers of width {WIDTH} in two stages, a worker each with one torch thread, AdamW,
{MICROBATCHES} microbatches of {ROWS} rows of {SEQUENCE} in flight (gpipe), a snapshot after every step, {STEPS} steps,
and a limit of memory that workers keep to as if it were tight (memory.tight), but where it says so. Measured is the
most anonymous memory (RssAnon) of a worker's process over that which it had when it was forked, with all imported,
every 5 ms; beside it what `stageline plan` tells. Runs of the same parameters must end with the same
weights, to the bit."""

COLUMNS = ("", "measured, MiB", "plan, MiB", "plan to measured", "seconds")


class UnequalWeights(Exception):
    """Error that weights differ where no bit may change."""


def measure(rounds: int) -> BenchmarkResult:
    """One round: memory is what it is."""
    rows, facts, plain = [], {}, None
    for name, own in CASES.items():
        sets = [*SETS, *own, *(() if "limit" in name else TIGHT)]
        found = _forecast(read_plan(PLAN, sets=sets, environment=os.environ))
        run = train_and_watch(PLAN, sets)
        plain = plain or run
        if name.startswith(("recompute", "offload", "plain")) and run.sha256 != plain.sha256:
            raise UnequalWeights(f"{name} ended with {run.sha256}, plain with {plain.sha256}")
        rows += [_row(name, run, each) for each in found]
        facts[name] = {"measured": run.peaks, "plan": [each.total for each in found], "seconds": run.seconds}
    return BenchmarkResult("Memory", ABOUT, (Table("", COLUMNS, tuple(rows)),), {"memory": facts})


def _forecast(plan: Plan) -> list[WorkerEstimate]:
    chosen = chosen_memory(plan, lambda what: None).keys if plan.chooses_memory else {}
    return estimate(plan.with_memory(chosen)).workers


def _row(name: str, run: MemoryRun, planned: WorkerEstimate) -> tuple[str, ...]:
    measured = run.peaks[planned.worker]
    return (
        f"{name}, worker {planned.worker}",
        f"{measured / 2**20:.0f}",
        f"{planned.total / 2**20:.0f}",
        f"{planned.total / measured:.2f}",
        f"{run.seconds:.0f}",
    )
