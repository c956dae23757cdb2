"""Claim: what a run records, and a question a second why it is slow, cost less than 1 % of its steps per second each.

python -m benchmarks recording
"""

import signal
import tempfile
import time
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from time import thread_time

import psutil

from benchmarks.measuring.finding import BenchmarkResult, Table
from benchmarks.measuring.paired import PairedRates, StartedRun, started
from benchmarks.measuring.rounds import PROGRESS
from benchmarks.measuring.usage import Usage, usage
from benchmarks.measuring.windows import TooFewWindows, Window, rates_in
from benchmarks.trainers.ours import PLAN, settings
from benchmarks.workload import MICROBATCHES, WORKLOADS, Workload
from stageline.broker.control.records import StepRecord
from stageline.broker.ledger.times import unreadable_times
from stageline.broker.slowness.pace import RunPace
from stageline.pipeline.program import Instruction, Program, compile_program
from stageline.pipeline.schedule import make_schedule
from stageline.workers.control.client import Client
from stageline.workers.runs.folder import read_broker_url
from stageline.workers.runtime.idle import Done, IdleTime, times_of
from stageline.workers.runtime.machine import Take

ASKED = PLAN.with_name("asked.toml")
SHORT = WORKLOADS[:2]  # workloads of short steps, of which recording is the largest part
WINDOWS = 8  # of each kind in a round
QUESTIONS = 4  # in a window, one a second
SKIPPED = 2  # blocks before the first that counts: the run began in them
LOOK = 0.02  # seconds between two looks at whether a block has ended
PATIENCE = 120.0  # seconds for a block
STEPS = 2000  # that the functions record alone
SCHEDULE = make_schedule("1f1b", [(0,), (1,)], MICROBATCHES)

ABOUT = f"""\
One run, of which every other block of steps is recorded: the times of actions, and waits with their causes, are
noted, packed, sent, stored and summed. In the other blocks the functions that note and pack them are replaced by such
that do nothing; there is no option for that. The processor's time is that of all processes of the run. A second table
has the functions alone, at work on steps of the last stage, each forward of which waits for its message; its share is
that of the processor's time above. Then a run of 8 stages and 64 microbatches, which in every other window of
{QUESTIONS} s is asked once a second, over one connection, why it is slow; the broker's processor time includes what
started it. A block or window is compared with the mean of the two around it; figures are medians, those in brackets
quartiles."""


@dataclass(frozen=True, slots=True)
class _Compared:
    """Steps per second, and seconds of the processor's time, with and without what is measured."""

    rates: PairedRates
    processor: PairedRates


def measure(rounds: int) -> BenchmarkResult:
    recorded = {workload: _recorded(workload, WINDOWS * rounds) for workload in SHORT}
    asked = _asked(WINDOWS * rounds)
    columns = ("workload", "steps/s without", "with", "costs", "processor, ms a step, without", "with", "costs")
    rows = tuple((str(workload), *_cells(found)) for workload, found in recorded.items())
    alone = _alone()
    tables = (
        Table("Recording", columns, rows),
        Table(
            "Functions that record, alone",
            ("workload", "workers, µs an action", "broker, µs an action", "share of the processor's time"),
            tuple(_of_alone(str(workload), found, *alone) for workload, found in recorded.items()),
        ),
        Table(
            "A question a second",
            ("workload", "steps/s without", "with", "costs", "broker's processor without", "with"),
            (("8 stages, 64 microbatches", *_cells(asked)[:3], *_shares(asked)),),
        ),
    )
    facts: list[dict[str, object]] = [
        {"what": what, "rates": _facts(found.rates), "processor": _facts(found.processor)}
        for what, found in [*((str(workload), each) for workload, each in recorded.items()), ("asked", asked)]
    ]
    facts.append({"what": "alone", "worker": alone[0], "broker": alone[1]})
    return BenchmarkResult("Recording, and questions why a run is slow", ABOUT, tables, {"recording": facts})


def _facts(found: PairedRates) -> dict[str, object]:
    return {"with": found.first, "without": found.second, "ratios": found.ratios.rounds}


def _cells(found: _Compared) -> tuple[str, ...]:
    """The figures without and with what is measured, and what it costs."""
    slower, more = found.rates, found.processor
    (recorded, plain), (used, less) = slower.rates, more.rates
    steps = (f"{plain.middle:.4g}", f"{recorded.middle:.4g}", _part([1 - 1 / each for each in slower.ratios.quartiles]))
    spent = (f"{1e3 * less.middle:.4g}", f"{1e3 * used.middle:.4g}")
    return (*steps, *spent, _part([1 / each - 1 for each in reversed(more.ratios.quartiles)]))


def _shares(found: _Compared) -> tuple[str, str]:
    """Share of a processor that the broker takes without questions, and with them."""
    used, less = found.processor.rates
    return f"{less.middle:.2%}".replace("%", " %"), f"{used.middle:.2%}".replace("%", " %")


def _part(quartiles: Sequence[float]) -> str:
    low, middle, high = (f"{100 * each:.2f}" for each in quartiles)
    return f"{middle} % ({low} to {high})"


def _of_alone(workload: str, found: _Compared, worker: float, broker: float) -> tuple[str, ...]:
    spent = (worker + broker) * sum(map(len, SCHEDULE.workers)) / found.processor.rates[0].middle
    return workload, f"{1e6 * worker:.2f}", f"{1e6 * broker:.2f}", f"{spent:.2%}".replace("%", " %")


def _alone() -> tuple[float, float]:
    """Seconds of the processor's time for an action of the last stage, at its worker and at the broker."""
    program, pace = compile_program(SCHEDULE), RunPace()
    actions = [Instruction(step, op) for step, op in program.ops(1, range(1))]
    began = thread_time()
    records = [StepRecord(1, step, _noted(actions, program, float(step))) for step in range(STEPS)]
    noted = thread_time()
    for record in records:
        assert not unreadable_times(record.times, MICROBATCHES)
        pace.note([record])
    return (noted - began) / STEPS / len(actions), (thread_time() - noted) / STEPS / len(actions)


def _noted(actions: Sequence[Instruction], program: Program, now: float) -> bytes:
    """A step's times as a worker notes and packs them."""
    idle, done = IdleTime(now), list[Done]()
    for each in actions:
        if each.op.takes:
            idle.lacks(Take(each.op.takes[0], each))
        idle.ends(now := now + 0.001)
        done.append(Done(each, now, now + 0.001, idle.taken(now := now + 0.001)))
    return times_of(done, program)


def _recorded(workload: Workload, windows: int) -> _Compared:
    """Blocks of one run, the recorded ones first."""
    block = workload.timed // 2
    with tempfile.TemporaryDirectory(prefix="blocks-") as folder:
        options = f"width = {workload.width}, layers = {workload.layers}, block = {block}, folder = '{folder}'"
        sets = [*settings(workload), "run.steps=1000000", "model.factory=unrecorded_workload.py:build"]
        with started(PLAN, [*sets, f"model.options={{ {options} }}"]) as run:
            run.send(signal.SIGCONT)
            ends, used = _blocks(run, Path(folder), SKIPPED + 2 * windows)
    rates = [block / (end - begin) for begin, end in pairwise(ends)]
    spent = [sum(after.since(before).ran.values()) / 1e9 / block for before, after in pairwise(used)]
    return _Compared(PairedRates.of(rates[::2], rates[1::2]), PairedRates.of(spent[::2], spent[1::2]))


def _ended_blocks(folder: Path) -> list[float]:
    """When the last stage ended each block, in seconds of `time.time`."""
    try:
        return [float(line) for line in (folder / "blocks").read_text().splitlines()]
    except FileNotFoundError:
        return []


def _blocks(run: StartedRun, folder: Path, count: int) -> tuple[list[float], list[Usage]]:
    """When each block from `SKIPPED` on ended, the first of them one that is not recorded, and what was used then."""
    used, process, until = list[Usage](), psutil.Process(run.group), time.monotonic() + PATIENCE
    while len(used) < count:
        if len(ends := _ended_blocks(folder)) > len(used):
            used += [usage(process)] * (len(ends) - len(used))
            until = time.monotonic() + PATIENCE
            PROGRESS.tell(f"block {len(used)} of {count}", run.group)
        if not run.is_alive or time.monotonic() > until:
            raise TooFewWindows(f"{len(used)} of {count} blocks of steps have ended")
        time.sleep(LOOK)
    return _ended_blocks(folder)[SKIPPED - 1 : count], used[SKIPPED - 1 : count]


def _asked(windows: int) -> _Compared:
    """Windows of one run, those first in which it is asked."""
    with started(ASKED) as run:
        run.send(signal.SIGCONT)
        (folder,) = run.runs.iterdir()
        url = read_broker_url(folder)
        assert url is not None, folder
        with Client(url) as client:
            workers = _threads(worker["pid"] for worker in client.ask("status")["workers"])
            found = [_window(run, client if number % 2 == 0 else None) for number in range(2 * windows)]
        rates = rates_in(run.ends(), found)
    shares = [_ran(each, workers) / 1e9 / (each.end - each.begin) for each in found]
    return _Compared(PairedRates.of(rates[::2], rates[1::2]), PairedRates.of(shares[::2], shares[1::2]))


def _window(run: StartedRun, client: Client | None) -> Window:
    before, begin = usage(psutil.Process(run.group)), time.time()
    for second in range(QUESTIONS):
        if client is not None:
            client.ask("why", timeout=PATIENCE)
        time.sleep(max(0.0, begin + second + 1 - time.time()))
    found = Window(begin, time.time(), usage(psutil.Process(run.group)).since(before))
    PROGRESS.tell("window", "plain" if client is None else "asked", seconds=found.end - begin)
    return found


def _threads(processes: Iterable[int]) -> set[int]:
    return {int(task.name) for process in processes for task in Path(f"/proc/{process}/task").iterdir()}


def _ran(window: Window, workers: Collection[int]) -> float:
    """Nanoseconds that threads of processes other than the workers ran."""
    return sum(ran for thread, ran in window.used.ran.items() if thread not in workers)
