"""Where the wall time of a short run goes: from the command to its first step, and from its last step to the prompt.

`python -m benchmarks.claims.startup` runs `stageline train examples/digits` for 72 steps, cold: no process of stageline
is there before. What happened when is read from the files of the run's folder, so runs take the time that they take
for a user. CPU seconds are those of all its processes.
"""

import os
import resource
import sqlite3
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from statistics import median
from time import time

import click

from benchmarks.measuring.finding import BenchmarkResult, Table
from benchmarks.measuring.machine import machine
from benchmarks.measuring.rounds import alternate

EXAMPLE = Path(__file__).parents[2] / "examples" / "digits"
STEPS = 72
COMMAND, BEGUN, TRIED, JOINED, FIRST, LAST, RESULT, PROMPT = (
    "the command",
    "the plan is read, the run named",
    "model, data and a microbatch are tried",
    "the workers have loaded both",
    "the first step begins",
    "the last step ends",
    "weights, metrics and the result are written",
    "all processes have ended",
)

ABOUT = f"""\
`stageline train examples/digits` for {STEPS} steps on two workers, without any process of stageline from before:
seconds from one event to the next, medians of the rounds. In the trial, the template process imports torch and
scikit-learn, and two processes forked from it train a microbatch; then broker and workers are forked."""


def measure(rounds: int) -> BenchmarkResult:
    runs = alternate({"startup": _run}, rounds)["startup"]
    names = [name for name in (COMMAND, BEGUN, TRIED, JOINED, FIRST, LAST, RESULT, PROMPT) if name in runs[0][0]]
    rows = [
        (name, f"{median(at[name] - at[before] for at, _ in runs):.2f}", f"{median(at[name] for at, _ in runs):.2f}")
        for before, name in pairwise(names)
    ]
    processor = median(seconds for _, seconds in runs)
    table = Table(f"{STEPS} steps; {processor:.1f} CPU seconds", ("until", "s", "since the command, s"), tuple(rows))
    return BenchmarkResult("Start-up", ABOUT, (table,), {"rounds": [at for at, _ in runs], "cpu_seconds": processor})


def _run() -> tuple[dict[str, float], float]:
    """When everything happened, in seconds since the command, and the CPU seconds that it took."""
    with tempfile.TemporaryDirectory() as folder:
        sets = (f"run.dir={folder}", f"run.steps={STEPS}")
        arguments = [word for each in sets for word in ("--set", each)]
        used, began = _cpu_seconds(), time()
        command = [sys.executable, "-P", "-m", "stageline", "train", str(EXAMPLE), *arguments, "--json"]
        subprocess.run(command, check=True, capture_output=True, env=dict(os.environ))
        ended = time()
        (run,) = Path(folder).iterdir()
        events = {COMMAND: began, **dict(_events(run)), PROMPT: ended}
        return {name: at - began for name, at in events.items()}, _cpu_seconds() - used


def _events(run: Path) -> Iterator[tuple[str, float]]:
    for name, file in ((BEGUN, "process.json"), (TRIED, "plan.json")):
        if (run / file).exists():
            yield name, (run / file).stat().st_mtime
    yield JOINED, max(log.stat().st_mtime for log in run.glob("worker-*.log"))
    actions = list(_actions(run / "broker.sqlite"))
    yield FIRST, min(actions)
    yield LAST, max(actions)
    yield RESULT, (run / "result.json").stat().st_mtime


def _actions(records: Path) -> Iterator[float]:
    """Starts and ends of all actions, in seconds since the epoch."""
    with sqlite3.connect(f"file:{records}?mode=ro", uri=True) as store:
        for (times,) in store.execute("SELECT times FROM step WHERE step < ?", (STEPS,)):
            yield from (at for (at,) in struct.iter_unpack("<d", times))


def _cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


@click.command()
@click.option("--rounds", default=3, show_default=True, type=click.IntRange(min=1))
def main(rounds: int) -> None:
    """Measure, and print the table."""
    click.echo(f"{measure(rounds)}\n\n{machine()}, load average {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
