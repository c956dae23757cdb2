"""Conversations with the coordinator without sockets or clocks: messages in, messages out, and the time given."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import msgspec

from stageline.broker.control.messages import (
    CONTROL_VERSION,
    Answer,
    Ask,
    Assigned,
    Finished,
    FromBroker,
    Hello,
    Report,
    Stop,
    ToBroker,
)
from stageline.broker.control.pace_answers import StatusFacts
from stageline.broker.control.records import Inspection, StepRecord
from stageline.broker.control.store import MemoryStore, Store
from stageline.broker.coordinator.coordinator import Coordinator
from stageline.broker.coordinator.kept_answer import unmeasured
from stageline.broker.coordinator.run import RunConfig, run_of
from stageline.broker.ledger.losses import Leases
from stageline.pipeline.program import Evaluation, Queue, ScriptCalls, SumExchange, compile_program
from stageline.pipeline.schedule import make_schedule
from support.packed import packed_times

PLAN = "d" * 64
SETTINGS: Mapping[str, object] = {"schedule": {"name": "1f1b", "microbatches": 4}}
SCHEDULE = make_schedule("1f1b", ((0,), (1,)), 4)
TERMS = RunConfig("digits", PLAN, SETTINGS, SCHEDULE, Leases(10.0, 10.0, 60.0), log_every=10)
SNAPSHOTS = replace(TERMS, restarts=2, snapshots=True)
WAITING = "waits for forward-1 message 0"

Sends = list[tuple[bytes, FromBroker]]


class Conversation:
    """A coordinator, the time, and workers 0 and 1 by the names of their places."""

    def __init__(
        self,
        store: Store | None = None,
        now: float | None = None,
        terms: RunConfig = TERMS,
        spent: Callable[[], float] = unmeasured,
    ) -> None:
        # Where workers may be replaced, incarnations count from the time on: from 0, so that they are 1, 2, 3, ...
        self.now = now if now is not None else 0.0 if terms.restarts else 1000.0
        self.store = store or MemoryStore()
        self.core = Coordinator(terms, self.store, run_of(self.store, PLAN, "run-1", b""), self.now, spent)

    def send(self, sender: bytes, message: ToBroker) -> Sends:
        return self.core.handle(sender, message, self.now)

    def after(self, seconds: float) -> Sends:
        """Time passes in small turns, as in a broker that is not overloaded."""
        sends, end = [], self.now + seconds
        while self.now < end:
            self.now = min(end, self.now + 0.1)
            sends += self.core.tick(self.now)
        return sends

    def status(self, **of: str) -> dict[str, object]:
        ((_, answer),) = self.send(b"me", Ask("status", of))
        assert isinstance(answer, Answer)
        assert answer.schema == "status/1"
        msgspec.convert(answer.facts, StatusFacts)
        json.dumps(answer.facts, allow_nan=False)
        return answer.facts

    def assigned(self, sender: bytes, hello: Hello) -> Assigned:
        """Registers and gets a place."""
        answers = [message for recipient, message in self.send(sender, hello) if recipient == sender]
        assert isinstance(answers[0], Assigned)
        return answers[0]

    def join(self, index: int) -> Sends:
        self.send(name(index), hello(index))
        said = hello(index, incarnation=index + 1, endpoint=f"ipc://{index}")
        return self.send(name(index), msgspec.structs.replace(said, queues=self.queues(index)))

    def queues(self, index: int) -> tuple[Queue, ...]:
        """Those that the process of place `index` has an end of."""
        config = self.core.run.config
        passes = [ScriptCalls()] if config.scripted else []
        return compile_program(config.schedule, [SumExchange(), Evaluation(is_told=True), *passes]).ends_of(index)


def name(index: int) -> bytes:
    return b"worker-%d" % index


def hello(
    index: int, *, incarnation: int = 0, endpoint: str = "", plan: str = PLAN, version: int = CONTROL_VERSION
) -> Hello:
    return Hello(version, plan, f"worker-{index}", "desk", 100 + index, endpoint, index, incarnation)


def having_read(index: int, step: int, *damages: str, there: Sequence[int] = (), claim: int | None = -1) -> Hello:
    """Of worker `index`, which has read its snapshot of `step`, and has others of the steps `there`."""
    found = Inspection(step, [] if damages else [index], list(damages))
    claims = index if claim == -1 else claim
    return msgspec.structs.replace(
        hello(index), claim=claims, snapshots=[(index, each) for each in (*there, step)], inspection=found
    )


def report(index: int, *, actions: int = 0, now: str = WAITING, **more: object) -> Report:
    return Report(index + 1, actions, now, since=999.0, idle=0.25, **more)  # type: ignore[arg-type]


def steps(stage: int, *which: int, loss: float | None = None) -> list[StepRecord]:
    """Each action takes a second; the first begins at 0, and there is a second between any two."""
    actions = SCHEDULE.workers[stage]
    times = packed_times((action, 2.0 * n, 2.0 * n + 1) for n, action in enumerate(actions))
    return [StepRecord(stage, step, times, loss) for step in which]


def finished(index: int) -> Finished:
    return Finished(index + 1, {f"{index}.weight": ("float32", (2, 3), f"{index}" * 64)})


def stop_reason(sends: list[tuple[bytes, FromBroker]], to: bytes) -> str:
    """Why `to` is stopped; it is sent nothing else."""
    (stop,) = [message for recipient, message in sends if recipient == to]
    assert isinstance(stop, Stop)
    return stop.reason
