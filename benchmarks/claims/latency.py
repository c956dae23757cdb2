"""Claim: over links of any latency, a run that chooses its schedule is about as fast as by the best schedule."""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from benchmarks.latency.turns import SteppedRun, StepsInTurn, take_steps
from benchmarks.measuring.finding import BenchmarkResult, Table
from benchmarks.trainers import ours
from benchmarks.workload import Timing
from stageline.pipeline.schedule import window_for

PLAN = Path(__file__).parents[1] / "latency" / "stageline.toml"
LATENCIES = (0.0, 0.005, 0.02, 0.08)  # seconds, one way
STAGES, MICROBATCHES, FORWARD = 4, 32, 0.013333
TIMED = 2  # steps of a turn
WARM, WARM_AUTO = 2, 20  # steps before; by auto it takes some to measure, to change, and to measure again

ABOUT = f"""\
Four workers with a stage each, {MICROBATCHES} microbatches, connected over tcp through a proxy that delays everything
by so much in each direction. A layer computes, and besides waits for {1000 * FORWARD:.1f} ms in its forward and for
{2000 * FORWARD:.1f} ms in its backward, so two processors are enough for four workers. Steps per second, medians over
the rounds: all runs are there at once and take turns of {TIMED} steps, `auto` after {WARM_AUTO} steps, in which it has
chosen. The ideal is a step in which no worker waits for another: the time for which the busiest worker is at work, as
the run by `1f1b` has measured it. To the best: the time of a step by `auto` to that by the fastest of the others, the
median of the ratios within the rounds. `window` is the one that `window_for` gives for the proxy's latency."""

COLUMNS = (
    "one way",
    "1f1b",
    "eager-1f1b",
    "window",
    "auto",
    "the ideal",
    "auto's choice",
    "auto to the best",
    "1f1b to the ideal",
    "auto to the ideal",
)


def measure(rounds: int, latencies: Sequence[float] = LATENCIES) -> BenchmarkResult:
    found = {latency: _at(latency, rounds) for latency in latencies}
    rows = tuple(_row(latency, turns) for latency, turns in found.items())
    facts = {
        str(latency): {name: each.rates.rounds for name, each in turns.items()} for latency, turns in found.items()
    }
    return BenchmarkResult("A schedule for the latency", ABOUT, (Table("", COLUMNS, rows),), {"latency": facts})


def _at(latency: float, rounds: int) -> dict[str, StepsInTurn]:
    window = window_for((latency,) * (STAGES - 1), FORWARD, 2 * FORWARD)
    chosen = {
        "1f1b": ["schedule.name=1f1b"],
        "eager-1f1b": ["schedule.name=eager-1f1b"],
        "window": ["schedule.name=window", f"schedule.window={list(window)}"],
        "auto": ["schedule.name=auto", "schedule.memory=100MiB"],
    }
    runs = {
        name: SteppedRun(partial(_train, latency, sets), WARM_AUTO if name == "auto" else WARM)
        for name, sets in chosen.items()
    }
    return take_steps(runs, rounds, TIMED)


def _train(latency: float, sets: Sequence[str], gate: str, steps: int) -> Timing:
    options = f"{{ stages = {STAGES}, forward = {FORWARD}, latency = {latency} }}"
    given = [f"model.options={options}", f'data.options={{ gate = "{gate}" }}', f"run.steps={steps}"]
    return ours.train_plan(PLAN, [*given, *sets])


def _row(latency: float, turns: Mapping[str, StepsInTurn]) -> tuple[str, ...]:
    rates = {name: each.rates for name, each in turns.items()}
    auto = rates.pop("auto")
    best = max(rates.values(), key=lambda each: each.middle)
    ideal = 1 / turns["1f1b"].timing.busy
    return (
        f"{1000 * latency:g} ms",
        *(f"{each.middle:.3f}" for each in (*rates.values(), auto)),
        f"{ideal:.3f}",
        turns["auto"].timing.schedule,
        f"{(best / auto).middle:.2f}",
        *(f"{ideal / each.middle:.2f}" for each in (rates["1f1b"], auto)),
    )
