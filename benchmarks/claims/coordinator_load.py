"""Claim: what the broker does for a stage does not grow with the number of stages."""

import tracemalloc
from time import perf_counter

import msgspec

from benchmarks.measuring.finding import BenchmarkResult, Table
from stageline.broker.control.messages import CONTROL_VERSION, FromBroker, Hello, Peers, Report
from stageline.broker.control.protocol import encode
from stageline.broker.control.records import StepRecord
from stageline.broker.control.store import MemoryStore
from stageline.broker.coordinator.coordinator import Coordinator
from stageline.broker.coordinator.run import RunConfig, run_of
from stageline.broker.ledger.losses import Leases
from stageline.broker.ledger.times import ENTRY
from stageline.pipeline.program import Program
from stageline.pipeline.schedule import Kind, make_schedule

STAGES = (10, 100, 1000)
PLAN = "0" * 64
_TIMES = b"".join(ENTRY.pack(kind.encode(), 0, 0.0, 1.0) for kind in (Kind.FORWARD, Kind.BACKWARD, Kind.UPDATE))

ABOUT = """\
The broker's decisions alone, without sockets or files: a worker for each stage joins, and then each reports a finished
step and a heartbeat, and a step later the same with a snapshot. Messages and bytes are those that the broker sends for
a stage and step; memory is what it keeps for a stage after a step; the times are those of a report, the mean of both.
With each snapshot the broker stores which worker has which place, of all stages: that time grows with their number. So
do the bytes of the message that tells each worker, once all have joined, where the others are."""


def measure(rounds: int) -> BenchmarkResult:
    rows, facts = [], {}
    for stages in STAGES:
        found = _load(stages)
        rows.append((str(stages), *(f"{value:.3g}" for value in found.values())))
        facts[str(stages)] = found
    columns = ("stages", "messages", "bytes", "kept, kB", "a report, ms", "with a snapshot, ms", "addresses, kB")
    return BenchmarkResult(
        "The broker's load by the number of stages", ABOUT, (Table("", columns, tuple(rows)),), {"coordinator": facts}
    )


def _load(stages: int) -> dict[str, float]:
    told = _Run(stages)
    plain, snapshots = told.step(snapshot=False), told.step(snapshot=True)
    tracemalloc.start()
    traced = _Run(stages)
    traced.step(snapshot=False)
    kept = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    return {
        "messages": told.messages / stages / 2,
        "bytes": told.bytes / stages / 2,
        "kept": kept / stages / 1000,
        "report": 1000 * plain / stages / 2,
        "snapshot": 1000 * snapshots / stages / 2,
        "addresses": told.addresses / 1000,
    }


class _Run:
    """Of so many stages, whose workers have joined. `messages` and `bytes` are those that the broker sent since."""

    def __init__(self, stages: int) -> None:
        self._stages = stages
        schedule = make_schedule("1f1b", [(stage,) for stage in range(stages)], 1)
        leases, store = Leases(10.0, 10.0, 60.0), MemoryStore()
        terms = RunConfig(
            "load", PLAN, {}, schedule, leases, log_every=10**6, restarts=2, snapshots=True, snapshot_every=2
        )
        self._core = Coordinator(terms, store, run_of(store, PLAN, "load", b"key"), 0.0)
        self.addresses = join(self._core, stages)
        self.messages = self.bytes = self._steps = 0

    def step(self, *, snapshot: bool) -> float:
        """The seconds in which the broker decides on all reports of a step."""
        step, now = self._steps, 1.0 + self._steps
        self._steps += 1
        began = perf_counter()
        answers = [each for stage in range(self._stages) for each in _reported(self._core, stage, step, now, snapshot)]
        answers += [message for _, message in self._core.tick(now)]
        seconds = perf_counter() - began
        self.messages += len(answers)
        self.bytes += sum(len(encode(message)) for message in answers)
        return seconds


def join(core: Coordinator, stages: int, program: Program | None = None) -> int:
    """The bytes of the message that says where all workers are; they have the queues of `program`."""
    told: list[FromBroker] = []
    for stage in range(stages):
        name = b"%d" % stage
        hello = Hello(CONTROL_VERSION, PLAN, f"worker-{stage}", "desk", stage + 1, "", stage)
        core.handle(name, hello, 0.0)
        known, queues = core.run.registry.members[stage].incarnation, program.ends_of(stage) if program else ()
        placed = msgspec.structs.replace(
            hello, incarnation=known, endpoint=f"tcp://10.0.0.1:{stage + 1}", queues=queues
        )
        told = [message for _, message in core.handle(name, placed, 0.0)]
    return max(len(encode(message)) for message in told if isinstance(message, Peers))


def _reported(core: Coordinator, stage: int, step: int, now: float, snapshot: bool) -> list[FromBroker]:
    """Answers to a report with a finished step, perhaps with its snapshot, and of a heartbeat."""
    known, doing = core.run.registry.members[stage].incarnation, f"{stage}{Kind.FORWARD}0 of step {step}"
    record = StepRecord(stage, step, _TIMES, 0.5)
    snapshots = [(stage, step + 1)] if snapshot else []
    full = Report(known, 3 * step, doing, now, 0.1, steps=[record], snapshots=snapshots, number=step + 1)
    heartbeat = Report(known, 3 * step + 1, doing, now, 0.1)
    answers = [*core.handle(b"%d" % stage, full, now), *core.handle(b"%d" % stage, heartbeat, now)]
    return [message for _, message in answers]
