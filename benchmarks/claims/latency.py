"""Claim: over links of any latency, a run that chooses its schedule is about as fast as by the best schedule."""

from itertools import pairwise
from pathlib import Path
from statistics import median

from benchmarks.measuring.finding import BenchmarkResult, Table
from benchmarks.trainers import ours
from stageline.pipeline.schedule import window_for

PLAN = Path(__file__).parents[1] / "latency" / "stageline.toml"
LATENCIES = (0.0, 0.005, 0.02, 0.08)  # seconds, one way
STAGES, MICROBATCHES, FORWARD = 4, 32, 0.013333
TIMED, WARM, WARM_AUTO = 4, 2, 8  # steps; by auto it takes some to measure, and to change

ABOUT = """\
Four workers with a stage each, 32 microbatches, 13.3 ms for a forward and 26.7 ms for a backward, connected over tcp
through a proxy that delays everything by so much in each direction. Seconds of a step, the median of four; a step in
which no worker waits takes 1.28 s. The layers compute, and besides wait for most of that time, so two processors are
enough for four workers. `window` is the one that `window_for` gives for the proxy's latency."""


def measure(rounds: int) -> BenchmarkResult:
    rows, facts = [], {}
    for latency in LATENCIES:
        window = window_for((latency,) * (STAGES - 1), FORWARD, 2 * FORWARD)
        choices = {
            "1f1b": (WARM, ["schedule.name=1f1b"]),
            "eager-1f1b": (WARM, ["schedule.name=eager-1f1b"]),
            "window": (WARM, ["schedule.name=window", f"schedule.window={list(window)}"]),
            "auto": (WARM_AUTO, ["schedule.name=auto", "schedule.memory=100MiB"]),
        }
        found = {name: _step(latency, warm, sets, rounds) for name, (warm, sets) in choices.items()}
        best = min(seconds for name, seconds in found.items() if name != "auto")
        ideal = MICROBATCHES * 3 * FORWARD
        shown = (f"{seconds:.3f}" for seconds in found.values())
        rows.append((f"{1000 * latency:g} ms", *shown, f"{found['auto'] / best:.2f}", f"{found['auto'] / ideal:.2f}"))
        facts[str(latency)] = found
    columns = ("one way", "1f1b", "eager-1f1b", "window", "auto", "auto to the best", "auto to the ideal")
    return BenchmarkResult("A schedule for the latency", ABOUT, (Table("", columns, tuple(rows)),), {"latency": facts})


def _step(latency: float, warm: int, sets: list[str], rounds: int) -> float:
    """Seconds of a step."""
    options = f"{{ stages = {STAGES}, forward = {FORWARD}, latency = {latency} }}"
    steps = warm + TIMED * rounds
    timing = ours.train_plan(PLAN, [f"model.options={options}", f"run.steps={steps}", *sets])
    return median(later - earlier for earlier, later in pairwise(timing.ends[warm - 1 :]))
