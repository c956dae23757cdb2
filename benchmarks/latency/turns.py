"""Runs that are all there at once and take turns of a few whole steps; the others wait, each between two steps.

1f1b          ## settles     ####                  ####
eager-1f1b      ## settles       ####                  ####         each step begins with empty queues,
auto               ### settles       ####                  ####     so waiting between two changes nothing
"""

import tempfile
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from benchmarks.measuring.processes import CONTEXT
from benchmarks.measuring.rounds import PROGRESS, Spread
from benchmarks.workload import Timing

from .gate import StepGate

LOOK = 0.02  # seconds between two looks at whether a run's turn is over


@dataclass(frozen=True, slots=True)
class SteppedRun:
    """Trains at the gate in a folder, so many steps: first `settling` ones, which do not count."""

    train: Callable[[str, int], Timing]
    settling: int


@dataclass(frozen=True, slots=True)
class StepsInTurn:
    """The steps per second of a run in each round, and how it ran."""

    rates: Spread
    timing: Timing


def take_steps(runs: Mapping[str, SteppedRun], rounds: int, steps: int) -> dict[str, StepsInTurn]:
    """Each run, after it has settled, for `steps` steps in each of the `rounds`. Raises what a run raises."""
    with ExitStack() as stack:
        pool = stack.enter_context(ProcessPoolExecutor(len(runs), mp_context=CONTEXT))
        gates, going, opened = {}, {}, {name: [] for name in runs}
        try:
            for name, run in runs.items():
                folder = stack.enter_context(tempfile.TemporaryDirectory())
                gates[name] = StepGate(Path(folder))
                gates[name].allow(run.settling)
                going[name] = pool.submit(run.train, folder, run.settling + rounds * steps)
                _await(gates[name], run.settling, going[name])
            for turn in range(rounds):
                for name, run in runs.items():
                    upto = run.settling + (turn + 1) * steps
                    opened[name].append(time.time())
                    gates[name].allow(upto)
                    _await(gates[name], upto, going[name])
                    rate = steps / (time.time() - opened[name][-1])
                    PROGRESS.tell(f"round {turn + 1} of {rounds}", name, steps_per_second=rate)
        finally:
            for name, gate in gates.items():
                gate.allow(runs[name].settling + rounds * steps)
        timings = {name: future.result() for name, future in going.items()}
        return {name: StepsInTurn(_rates(opened[name], timings[name], steps), timings[name]) for name in runs}


def _await(gate: StepGate, step: int, run: "Future[Timing]") -> None:
    """Returns when the run waits to begin `step`, or has ended."""
    while not gate.waits_for(step):
        if run.done():
            run.result()
            return
        time.sleep(LOOK)


def _rates(opened: list[float], timing: Timing, steps: int) -> Spread:
    """From when a turn was given to the end of its last step."""
    ends = timing.ends[len(timing.ends) - len(opened) * steps :][steps - 1 :: steps]
    return Spread(tuple(steps / (end - began) for began, end in zip(opened, ends, strict=True)))
