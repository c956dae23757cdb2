"""Answers about queues, with the counts of both ends joined, and about the microbatches that are under way.

The ends of a queue are reported by two workers, at two moments: `counted` says how old each count is. A queue is known
from the processes that have told the broker of their ends, also before any of them has counted it.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import islice

import msgspec

from stageline.broker.control.answers import (
    ConsumerFacts,
    MessagePlace,
    MicrobatchesFacts,
    MicrobatchRow,
    ProducerFacts,
    QueueFacts,
    QueueRow,
    QueuesFacts,
    ResendFact,
)
from stageline.broker.control.queue_counts import Depth, Intake
from stageline.broker.ledger.ledger import MicrobatchPosition, MicrobatchState
from stageline.broker.ledger.member import SCRIPT, Flowing, Member
from stageline.pipeline.program import Queue

from .pausing import told
from .state import RunState

MOST_ROWS = 1000  # microbatches in one answer
MOST_STEPS = 64  # open steps that are looked at: a stage that runs forward only may be far ahead
MOST_LOOKED = 2**16  # microbatches at all their stages, likewise, if these are more than two steps
_AT_REST = (MicrobatchState.QUEUED, MicrobatchState.DONE)


class BadQuery(Exception):
    """The error that a parameter of the query is missing or invalid."""


def queues(run: RunState, of: Mapping[str, str], now: float) -> dict[str, object]:
    """Return a row for each queue of the run."""
    known = _known(run)
    ages = [age for queue in known.values() for end in _ends(run, queue, now) if (age := end.age) is not None]
    rows = [_row(run, queue, now) for queue in known.values()]
    return _facts(QueuesFacts(run=run.id, heard=max(ages, default=None), queues=rows)) | {"paused": told(run)}


def queue(run: RunState, of: Mapping[str, str], now: float) -> dict[str, object]:
    """Return both ends of the queue `name`. Raises `BadQuery` if there is none."""
    found = named_queue(run, of)
    producer, consumer = _ends(run, found, now)
    return _facts(
        QueueFacts(
            run=run.id,
            row=_row(run, found, now),
            unit=found.unit,
            count=found.count,
            window=found.window,
            codec=found.codec,
            producer=_producer(found, producer),
            consumer=_consumer(found, consumer),
        )
    )


def queue_counts(run: RunState, now: float) -> Iterator[tuple[QueueRow, Depth | None, Intake | None]]:
    """Yield the row of each queue, with what its producer and its consumer have counted; `now` is in seconds."""
    for found in _known(run).values():
        producer, consumer = _ends(run, found, now)
        yield _row(run, found, now), producer.depth(found.name), consumer.intake(found.name)


def microbatches(run: RunState, of: Mapping[str, str], now: float) -> dict[str, object]:
    """Return the microbatches in the state `state`; without it, all that are begun and not done."""
    wanted = of.get("state")
    if wanted is not None and wanted not in list(MicrobatchState):
        raise BadQuery(f"no microbatch is ever {wanted!r}: the states are {', '.join(MicrobatchState)}")
    counts: Counter[str] = Counter()
    rows = (row for row in _open_microbatches(run, counts) if _is_wanted(row.state, wanted))
    shown = list(islice(rows, MOST_ROWS))
    left_out = sum(1 for _ in rows)
    states = {str(state): counts[state] for state in MicrobatchState}
    found = MicrobatchesFacts(run=run.id, state=wanted, states=states, microbatches=shown, left_out=left_out)
    return _facts(found)


def named_queue(run: RunState, of: Mapping[str, str]) -> Queue:
    """Return the queue that a query names. Raises `BadQuery`, which names the queues that there are."""
    known, name = _known(run), of.get("name", "")
    if name not in known:
        there = f"there are {', '.join(known)}" if known else "no worker has told of its queues yet"
        raise BadQuery(f"run {run.id} has no queue {name!r}: {there}")
    return known[name]


class _End:
    """End of a queue at a time: the process that has it, and what it has counted."""

    def __init__(self, member: Member | None, now: float) -> None:
        self.member = member
        self.report = None if member is None else member.report
        self._now = now

    @property
    def name(self) -> str:
        """The process for people; "" if there is none."""
        return "" if self.member is None else self.member.process

    @property
    def age(self) -> float | None:
        """Age of the counts in seconds; None without any."""
        if self.member is None or self.report is None or not (self.report.puts or self.report.takes):
            return None
        return max(0.0, self._now - self.member.last_seen) + self.report.counted

    def depth(self, name: str) -> Depth | None:
        """Return what this process has counted as the producer of a queue."""
        return None if self.report is None else self.report.puts.get(name)

    def intake(self, name: str) -> Intake | None:
        """Return what this process has counted as the consumer of a queue."""
        return None if self.report is None else self.report.takes.get(name)

    def pace(self, name: str, way: Flowing) -> float | None:
        """Return how many messages pass this end in a second."""
        return None if self.member is None else self.member.pace.rate(name, way)


def _known(run: RunState) -> dict[str, Queue]:
    """Return the queues that the run's processes have told of, by name, those of the first worker first."""
    members = [run.registry.members[index] for index in sorted(run.registry.members)]
    return {each.name: each for member in members for each in member.queues}


def _ends(run: RunState, found: Queue, now: float) -> tuple[_End, _End]:
    members = run.registry.members
    return _End(members.get(found.producer), now), _End(members.get(found.consumer), now)


def _row(run: RunState, found: Queue, now: float) -> QueueRow:
    producer, consumer = _ends(run, found, now)
    depth, intake = producer.depth(found.name), consumer.intake(found.name)
    row = QueueRow(
        queue=found.name,
        producer=_end_label(run, found.producer, found.source),
        consumer=_end_label(run, found.consumer, found.target),
        taken=None if intake is None else intake.taken,
        put_pace=producer.pace(found.name, Flowing.PUT),
        taken_pace=consumer.pace(found.name, Flowing.TAKEN),
    )
    if depth is None:
        return row
    put = depth.put if intake is None else max(depth.put, intake.received)  # which may be counted later
    used, limit = _credit(put, depth, intake)
    return msgspec.structs.replace(
        row,
        put=put,
        ready=depth.ready,
        in_flight=depth.in_flight,
        retained=depth.retained,
        bytes=depth.bytes,
        credit_used=used,
        credit_limit=limit,
        resent=depth.resent,
        oldest=depth.oldest + (producer.age or 0.0) if depth.retained else 0.0,
    )


def _credit(put: int, depth: Depth, intake: Intake | None) -> tuple[int, int | None]:
    """Return how many granted messages are put and not taken, and how many may be; None for any number.

    The consumer's report counts, if there is one.
    """
    taken = depth.arrived if intake is None else intake.taken
    newest = depth.granted if intake is None or intake.granted is None else intake.granted
    if newest is None:
        return max(0, put - taken), None
    return max(0, min(put, newest) - taken), max(0, newest - taken)


def _end_label(run: RunState, place: int, copy: int | None) -> str:
    if copy is not None:
        return f"stage {run.config.schedule.label(copy)}"
    return f"worker {place}" if run.config.placement[place] else SCRIPT


def _producer(found: Queue, end: _End) -> ProducerFacts:
    depth = end.depth(found.name)
    if depth is None:
        return ProducerFacts(worker=found.producer, name=end.name)
    resends = [
        ResendFact(first=each.first, end=each.end, reason=each.reason, ago=each.ago + (end.age or 0.0))
        for each in depth.resends
    ]
    return ProducerFacts(
        worker=found.producer,
        name=end.name,
        counted=end.age,
        put=_place(found, depth.put),
        sent=depth.sent,
        arrived=depth.arrived,
        granted=depth.granted,
        first=_place(found, depth.put - depth.retained),
        ready=depth.ready,
        in_flight=depth.in_flight,
        retained=depth.retained,
        bytes=depth.bytes,
        put_bytes=depth.put_bytes,
        oldest=depth.oldest,
        pace=end.pace(found.name, Flowing.PUT),
        resent=depth.resent,
        resends=resends,
    )


def _consumer(found: Queue, end: _End) -> ConsumerFacts:
    intake = end.intake(found.name)
    if intake is None:
        return ConsumerFacts(worker=found.consumer, name=end.name)
    return ConsumerFacts(
        worker=found.consumer,
        name=end.name,
        counted=end.age,
        received=intake.received,
        taken=_place(found, intake.taken),
        granted=intake.granted,
        waiting=max(0, intake.received - intake.taken),
        pace=end.pace(found.name, Flowing.TAKEN),
        duplicates=intake.duplicates,
        damaged=intake.damaged,
        lost=intake.lost,
    )


def _place(found: Queue, number: int) -> MessagePlace:
    index, microbatch = found.at(max(0, number))
    return MessagePlace(number=max(0, number), unit=found.unit, index=index, microbatch=microbatch)


def _open_microbatches(run: RunState, counts: Counter[str]) -> Iterator[MicrobatchRow]:
    """Yield the microbatches of open steps at every stage, by step and microbatch; count them by state."""
    schedule, ledger = run.config.schedule, run.ledger
    most = max(2, min(MOST_STEPS, MOST_LOOKED // (schedule.stages * schedule.microbatches)))
    for step in range(ledger.finished_floor, min(ledger.begun, ledger.finished_floor + most)):
        for microbatch in range(schedule.microbatches):
            for stage in range(schedule.stages):
                row = _microbatch(run, schedule.replicas.having(stage, microbatch), step, microbatch)
                counts[row.state] += 1
                yield row


def _microbatch(run: RunState, copy: int, step: int, microbatch: int) -> MicrobatchRow:
    schedule, entry = run.config.schedule, run.ledger.entry(MicrobatchPosition(copy, step, microbatch))
    return MicrobatchRow(
        step=step,
        microbatch=microbatch,
        stage=schedule.label(copy),
        worker=schedule.owner(copy),
        state=str(entry.state),
        since=entry.since,
        holder=None if entry.holder is None else entry.holder.name,
    )


def _is_wanted(state: str, wanted: str | None) -> bool:
    return state == wanted if wanted is not None else state not in _AT_REST


def _facts(found: msgspec.Struct) -> dict[str, object]:
    facts: dict[str, object] = msgspec.to_builtins(found)
    return facts
