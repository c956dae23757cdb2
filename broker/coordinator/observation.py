"""What a broker keeps of its run for those who ask after its end, beside what it needs to continue the run.

Workers' newest reports, open microbatches, metrics and anomalies live in its memory alone. `observe` puts them into one
fact, about once a second; `recall` takes them back into the restored records. No decision is made from them.
"""

from collections.abc import Mapping
from math import isfinite

import msgspec

from stageline.broker.control.messages import Exited, Report
from stageline.broker.control.records import Event
from stageline.broker.ledger.ledger import Holder, IllegalTransition
from stageline.broker.ledger.member import Member, MemberStatus
from stageline.broker.stores.base import Fact

from .records import RunRecords

OBSERVED = "observed"  # the name of the fact
EVERY = 1.0  # seconds between two observations


class _ObservedMember(msgspec.Struct, frozen=True):
    incarnation: int
    status: MemberStatus
    last_seen: float
    last_progress: float
    activity_since: float
    exited: tuple[float, Exited] | None
    report: Report | None


class _ObservedMicrobatch(msgspec.Struct, frozen=True):
    event: Event
    holder: Holder


class Observation(msgspec.Struct, frozen=True):
    """The run as its broker saw it `at` that time (seconds since the epoch).

    A metric that is no finite number is a text: JSON has no such number.
    """

    at: float
    training_steps: int | None
    metrics: dict[str, float | str]
    oddities: dict[str, int]
    damaged: list[str]
    members: list[_ObservedMember]
    microbatches: list[_ObservedMicrobatch]


def observe(run: RunRecords, damaged: tuple[str, ...], now: float) -> Fact:
    """What is to be stored as `OBSERVED`."""
    seen = Observation(
        now,
        run.training_steps,
        {name: value if isfinite(value) else str(value) for name, value in run.metrics.items()},
        dict(run.events.anomalies),
        list(damaged),
        [_member(member) for member in run.registry.members.values()],
        list(_open_microbatches(run)),
    )
    found: Fact = msgspec.to_builtins(seen, str_keys=True)
    return found


def recall(run: RunRecords, fact: Fact) -> Observation:
    """Completes the records, which were restored from the same store; returns the observation.

    Of a worker whose place was given to another afterwards nothing is taken. Raises `msgspec.ValidationError`.
    """
    seen = _recall_result(run, fact)
    run.events.anomalies.update(seen.oddities)
    for each in seen.members:
        if (member := run.registry.current(each.incarnation)) is not None:
            member.status, member.report, member.exited = each.status, each.report, each.exited
            member.last_seen, member.last_progress = each.last_seen, each.last_progress
            member.activity_since = each.activity_since
            member.sender = member.sender or b"recorded"  # else it would count as not heard of since a restart
    for entry in seen.microbatches:
        _reopen(run, entry)
    return seen


def recall_result(run: RunRecords, facts: Mapping[str, Fact]) -> None:
    """Takes back what is told of a run that is over: its steps and its metrics. Raises `msgspec.ValidationError`."""
    if fact := facts.get(OBSERVED):
        _recall_result(run, fact)


def _recall_result(run: RunRecords, fact: Fact) -> Observation:
    seen = msgspec.convert(fact, Observation)
    run.training_steps = seen.training_steps
    run.metrics = {name: float(value) for name, value in seen.metrics.items()}
    return seen


def _member(member: Member) -> _ObservedMember:
    report = member.report and msgspec.structs.replace(member.report, steps=[], events=[], snapshots=[], evaluations=[])
    return _ObservedMember(
        member.incarnation,
        member.status,
        member.last_seen,
        member.last_progress,
        member.activity_since,
        member.exited,
        report,
    )


def _open_microbatches(run: RunRecords) -> list[_ObservedMicrobatch]:
    found = (held for stage in range(run.config.schedule.copies) for held in run.ledger.unfinished(stage))
    return [
        _ObservedMicrobatch(
            Event(held.position.stage, held.position.step, held.position.microbatch, str(held.entry.state), since), by
        )
        for held in found
        if (since := held.entry.since) is not None and (by := held.entry.holder) is not None
    ]


def _reopen(run: RunRecords, entry: _ObservedMicrobatch) -> None:
    """Unless its step is finished: the records are newer than the observation."""
    if 0 <= entry.event.stage < len(run.ledger.finished) and entry.event.step >= run.ledger.finished[entry.event.stage]:
        try:
            run.ledger.enter(entry.event, entry.holder)
        except IllegalTransition as error:
            raise msgspec.ValidationError(str(error)) from error
