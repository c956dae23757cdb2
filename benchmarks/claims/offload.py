"""Claim: a stage whose state is three times the memory that its worker may have trains to the same weights.

What is limited is the memory of the worker's control group: what its process allocates from the making of its model on,
and what is in memory of the files that it maps, reads and writes.
"""

import mmap
import os
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.measuring.finding import BenchmarkResult, Table
from benchmarks.measuring.memory_group import memory_group
from benchmarks.trainers.ours import PLAN, train_plan
from benchmarks.workload import Timing
from stageline.pipeline.plan import read_plan
from stageline.workers.extras.preflight.trial import estimate

WIDTH, LAYERS, SEQUENCE, ROWS, MICROBATCHES, WARM, TIMED = 1024, 4, 64, 4, 2, 1, 2
MB = 10**6
SETS = (
    f"run.steps={WARM + TIMED}",
    "model.factory=limited.py:build",
    "model.cut=[1]",
    f"data.options={{ width = {WIDTH}, sequence = {SEQUENCE} }}",
    f"data.batch_size={MICROBATCHES * ROWS}",
    f"schedule.microbatches={MICROBATCHES}",
    "optimizer.factory=torch.optim.AdamW",
)
OFFLOAD = 'memory.offload=["activations", "weights", "optimizer"]'

ABOUT = f"""\
{2 * LAYERS} transformer encoder layers of width {WIDTH}, the first in stage 0, the others in stage 1; a worker each
with one torch thread, AdamW, {MICROBATCHES} microbatches of {ROWS} rows of {SEQUENCE}, 1f1b, no snapshots. The worker
of stage 1 is in a control group of Linux from the making of its model on: the limit counts what its process allocates
and what is in memory of its files. The limit is a third of weights, gradients and optimizer state of stage 1; offloaded
are activations, weights and optimizer. Rates are those of {TIMED} steps after {WARM}. The trial of one microbatch,
before the run, is not in the group. All runs must end with the same weights, to the bit. The disk is measured before
them with a file of the size of that state, written and synced, then read after its pages were dropped from memory."""

COLUMNS = ("", "steps/s", "to the first", "most in memory, MB", "seconds")


class UnequalDigests(Exception):
    """Memory has changed the weights."""


@dataclass(frozen=True, slots=True)
class Case:
    """`limited`: to a third of the state."""

    limited: bool
    offloads: bool
    ahead: bool = True


CASES: Mapping[str, Case] = {
    "all memory, no offload": Case(limited=False, offloads=False),
    "all memory, offload": Case(limited=False, offloads=True),
    "a third, offload": Case(limited=True, offloads=True),
    "a third, offload, nothing read ahead": Case(limited=True, offloads=True, ahead=False),
}


def measure(rounds: int) -> BenchmarkResult:
    """One round: the runs take long."""
    state = _state()
    written, read = disk_speed(state)
    found = {name: _run(case, state // 3) for name, case in CASES.items()}
    if len({timing.sha256 for timing, _ in found.values()}) > 1:
        raise UnequalDigests(str({name: timing.sha256 for name, (timing, _) in found.items()}))
    first = _rate(next(iter(found.values()))[0])
    rows = tuple(_row(name, timing, most, first) for name, (timing, most) in found.items())
    disk = Table("", ("", "MB/s"), (("disk, written", f"{written / MB:.0f}"), ("disk, read", f"{read / MB:.0f}")))
    about = f"{ABOUT} State: {state / MB:.0f} MB, limit: {state // 3 / MB:.0f} MB."
    facts = {name: {"rate": _rate(timing), "most": most} for name, (timing, most) in found.items()}
    return BenchmarkResult(
        "Offload",
        about,
        (Table("", COLUMNS, rows), disk),
        {"offload": facts, "state": state, "written": written, "read": read},
    )


def disk_speed(size: int) -> tuple[float, float]:
    """Bytes per second that a file of `size` bytes is written with, and read from the disk."""
    block = mmap.mmap(-1, 1 << 24)
    block[:] = os.urandom(1 << 24)
    with tempfile.TemporaryDirectory() as folder, open(Path(folder) / "file", "w+b", buffering=0) as file:
        with _timed() as written:
            file.writelines(block for _ in range(0, size, len(block)))
            os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        file.seek(0)
        with _timed() as read:
            while file.readinto(block):
                pass
    return size / written[0], size / read[0]


@contextmanager
def _timed() -> Iterator[list[float]]:
    """Gives a list that has the seconds in the end."""
    start, found = time.monotonic(), [0.0]
    yield found
    found[0] = time.monotonic() - start


def _run(case: Case, limit: int) -> tuple[Timing, int]:
    """The run, and the most bytes that its group had in memory."""
    with memory_group(limit if case.limited else None) as group:
        timing = train_plan(PLAN, [*SETS, _model(str(group.folder), case.ahead), *([OFFLOAD] if case.offloads else [])])
        return timing, group.most


def _model(group: str, ahead: bool) -> str:
    return f'model.options={{ width = {WIDTH}, layers = {LAYERS}, group = "{group}", ahead = {str(ahead).lower()} }}'


def _state() -> int:
    """Bytes of weights, gradients and optimizer of stage 1."""
    stages = estimate(read_plan(PLAN, sets=[*SETS, _model("", True)], environment=os.environ)).stages
    return sum(stages[1].bytes[part] for part in ("weights", "gradients", "optimizer"))


def _rate(timing: Timing) -> float:
    return timing.steps_per_second(WARM)


def _row(name: str, timing: Timing, most: int, first: float) -> tuple[str, ...]:
    rate = _rate(timing)
    return (name, f"{rate:.3f}", f"{rate / first:.2f}", f"{most / MB:.0f}", f"{timing.seconds:.0f}")
