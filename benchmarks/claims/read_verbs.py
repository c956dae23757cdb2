"""Claim: the broker answers what reading commands ask within 200 ms, for 8 stages and 64 microbatches, and spends less
than 1 % of a processor on each of them if it is asked once a second.

python -m benchmarks read-verbs
"""

from collections.abc import Callable, Mapping
from statistics import median
from time import perf_counter, thread_time

import msgspec

from benchmarks.claims.coordinator_load import PLAN, join
from benchmarks.measuring.finding import BenchmarkResult, Table
from stageline.broker.control.messages import Answer, Ask, Report
from stageline.broker.control.protocol import encode
from stageline.broker.control.queue_counts import Depth, Intake
from stageline.broker.control.records import Event, StepRecord
from stageline.broker.control.store import MemoryStore
from stageline.broker.coordinator.coordinator import Coordinator
from stageline.broker.coordinator.kept_answer import unmeasured
from stageline.broker.coordinator.run import RunConfig, run_of
from stageline.broker.ledger.losses import Leases
from stageline.broker.ledger.times import ENTRY, WaitCause
from stageline.broker.slowness.planned import PlannedSteps
from stageline.pipeline.program import Costs, Program, Timed, compile_program
from stageline.pipeline.schedule import Schedule, make_schedule

SIZES = ((8, 64), (64, 64))  # stages, microbatches
STEPS, OPEN = 8, 2  # finished, and begun
ASKED = 60  # times that a command is asked, once a second
VERBS: Mapping[str, tuple[str, dict[str, str]]] = {
    "why": ("why", {}),
    "status": ("status", {}),
    "timetable": ("timetable", {}),
    "queue ls": ("queues", {}),
    "queue show": ("queue", {"name": "forward-1"}),
    "microbatch ls": ("microbatches", {}),
    "story": ("story", {"step": "4", "microbatch": "2"}),
}

ABOUT = f"""\
The broker's work for one question of a reading command, without sockets: the answer is made and encoded. The broker
knows {STEPS} finished steps and {OPEN} that every stage is in the middle of; stage 1 takes three times as long as the
others, so that `why` has a finding with remedies to simulate. The first answer of a broker may take longer than the
medians of the others, each of which is computed: it computes the bubble that the schedule plans. The last column is
the processor's time for a command that is asked once a second, {ASKED} times, while workers report: then the broker
gives an answer to `why` again for as long as its age, which it tells, is below 200 times what it cost."""


def measure(rounds: int) -> BenchmarkResult:
    facts = {f"{stages} x {microbatches}": _answers(stages, microbatches, rounds) for stages, microbatches in SIZES}
    columns = tuple(f"{size}, {which}" for size in facts for which in ("first ms", "then ms", "once a second"))
    rows = tuple((verb, *(cell for of in facts.values() for cell in _cells(of[verb]))) for verb in VERBS)
    table = Table("", ("command", *columns), rows)
    return BenchmarkResult("Answers to reading commands, by stages x microbatches", ABOUT, (table,), {"answers": facts})


def _cells(taken: Mapping[str, float]) -> tuple[str, ...]:
    return (*(f"{1000 * taken[which]:.3g}" for which in ("first", "then")), f"{taken['share']:.2%}".replace("%", " %"))


def _answers(stages: int, microbatches: int, rounds: int) -> dict[str, dict[str, float]]:
    """By command, the seconds of the first answer of a broker and of later ones, and the share of a processor."""
    core = _AskedRun(stages, microbatches).core
    taken = {
        verb: [_seconds(core, *asked, float(STEPS), perf_counter) for _ in range(rounds + 1)]
        for verb, asked in VERBS.items()
    }
    return {
        verb: {
            "first": first,
            "then": median(others),
            "share": _share(_AskedRun(stages, microbatches, thread_time), verb),
        }
        for verb, (first, *others) in taken.items()
    }


def _seconds(core: Coordinator, what: str, of: dict[str, str], now: float, clock: Callable[[], float]) -> float:
    began = clock()
    ((_, answer),) = core.handle(b"asking", Ask(what, of), now)
    encode(answer)
    seconds = clock() - began
    assert isinstance(answer, Answer), answer
    return seconds


def _share(run: "_AskedRun", verb: str) -> float:
    """Processor's time for a second of a command that is asked once a second."""
    spent = 0.0
    for second in range(ASKED):
        now = float(STEPS + second)
        run.report(now, 2 + second)
        spent += _seconds(run.core, *VERBS[verb], now, thread_time)
    return spent / ASKED


class _AskedRun:
    """A run whose workers have joined and have reported their steps."""

    def __init__(self, stages: int, microbatches: int, spent: Callable[[], float] = unmeasured) -> None:
        schedule = make_schedule("1f1b", [(stage,) for stage in range(stages)], microbatches)
        leases, store = Leases(10.0, 10.0, 60.0), MemoryStore()
        terms = RunConfig(
            "read", PLAN, {}, schedule, leases, log_every=10**6, restarts=2, snapshots=True, snapshot_every=20
        )
        self.core = Coordinator(terms, store, run_of(store, PLAN, "read", b"key"), 0.0, spent)
        program = compile_program(schedule)
        join(self.core, stages, program)
        timed = PlannedSteps(schedule, STEPS).timed(_costs(stages))
        self._reports = [
            self._reported(worker, schedule, program, [each for each in timed if each.worker == worker])
            for worker in range(stages)
        ]

    def report(self, now: float, number: int) -> None:
        """All workers report that they are at work, in reports of this number."""
        for worker, first in enumerate(self._reports):
            said = msgspec.structs.replace(first, since=now, steps=[], events=[], actions=1000 + number, number=number)
            self.core.handle(b"%d" % worker, said, now)

    def _reported(self, worker: int, schedule: Schedule, program: Program, timed: list[Timed]) -> Report:
        known, now = self.core.run.registry.members[worker].incarnation, float(STEPS)
        records = [StepRecord(worker, step, _times(timed, step, schedule.stages)) for step in range(STEPS)]
        events = [
            Event(worker, step, microbatch, "stashed", now)
            for step in range(STEPS, STEPS + OPEN)
            for microbatch in range(schedule.microbatches // 2)
        ]
        puts = {queue.name: Depth(1, 2, 40, 10**6, 1.0, put=40) for queue in program.outbound(worker)}
        takes = {queue.name: Intake(40, 38) for queue in program.inbound(worker)}
        doing = f"{worker}F2 of step {STEPS}"
        report = Report(known, 999, doing, now, 0.1, steps=records, events=events, puts=puts, takes=takes, number=1)
        self.core.handle(b"%d" % worker, report, now)
        return report


def _costs(stages: int) -> Costs:
    forward = tuple(0.003 if stage == 1 else 0.001 for stage in range(stages))
    return Costs(forward, forward, forward, (1e-4,) * stages, (1e-5,) * (stages - 1))


def _times(timed: list[Timed], step: int, stages: int) -> bytes:
    """A record's times of a worker's actions in a step, each with the wait for its message before it."""
    entries, free = [], 0.0
    for each in timed:
        action = each.action
        other = action.stage + {"F": -1, "B": 1}.get(action.kind, stages)
        if each.step == step and each.start > free and 0 <= other < stages:
            entries.append(ENTRY.pack(WaitCause.MESSAGE.encode(), other, free, each.start))
        if each.step == step:
            entries.append(ENTRY.pack(action.kind.encode(), action.microbatch, each.start, each.end))
        free = each.end
    return b"".join(entries)
