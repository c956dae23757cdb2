"""A run's stored records, from which a broker continues, and the observations that are stored for later queries.

A worker's incarnation and the complete checkpoint are decided together and stored in one write: a broker killed at any
moment cannot leave an incarnation that begins at another step than its worker was told.

Workers' newest reports, open microbatches and anomalies live in the broker's memory alone. `keep_observation` stores
them as one fact, about once a second, for queries after the broker's end; `recall` takes that fact back into restored
records. No decision is made from it.

Reads all parts of the state. Writes, after a loss: `ledger`, `checkpoints`, `lost_work`,
`milestones`.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Literal

import msgspec

from stageline.broker.control.messages import Exited, Report
from stageline.broker.control.protocol import RunKeys
from stageline.broker.control.records import EvaluationRecord, Event
from stageline.broker.control.store import Fact, Store, StoredRun
from stageline.broker.ledger.checkpoint_tracker import CheckpointTracker
from stageline.broker.ledger.evaluations import Evaluations, fact_name, fact_of, stored_in
from stageline.broker.ledger.ledger import Holder, IllegalTransition, Ledger
from stageline.broker.ledger.losses import Replacement, Replacements, Standstill
from stageline.broker.ledger.member import Member, MemberStatus
from stageline.broker.ledger.milestones import Milestone, Milestones
from stageline.broker.ledger.orders import OrderBook
from stageline.broker.ledger.pauses import PauseBook
from stageline.broker.ledger.recovery import LostAttempt, StartSearch, lost_attempts
from stageline.broker.ledger.registry import Registry
from stageline.broker.ledger.trend import Trend

from .run import RunConfig, RunIdentity, RunOutcome, RunPhase
from .state import KEPT_LOSSES, RunState

OBSERVED, _REGISTRY, _TREND = "observed", "registry", "trend"  # names of facts
EVERY = 1.0  # seconds between two observations
_RUNS = (MemberStatus.PRESENT, MemberStatus.FINISHED)  # of a member whose process is there


class _Replacing(msgspec.Struct):
    gaps: list[Replacement] = []
    in_a_row: list[tuple[int, int]] = []
    ever: list[tuple[int, int]] = []


class _Progress(msgspec.Struct):
    """The part of the stored record that is not the registry's own."""

    checkpoints: CheckpointTracker
    replacing: _Replacing
    attempts: list[LostAttempt] = []
    milestones: list[Milestone] = []


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
    """A run as its broker saw it at the time `at`, in seconds since the epoch.

    Other times are by the same clock, which is `behind` the system's by so many seconds.
    """

    at: float
    training_steps: int | None
    oddities: dict[str, int]
    damaged: list[str]
    members: list[_ObservedMember]
    microbatches: list[_ObservedMicrobatch]
    behind: float = 0.0


def restored(run: str, config: RunConfig, store: Store, stored: StoredRun, now: float) -> RunState:
    """Return the state of a run as its records tell it; each of its workers has a lease from `now` on.

    Args:
        run: The run's id.
        config: The broker's part of the plan.
        store: Where the run's records are kept.
        stored: What `store` has of the run.
        now: Seconds since the epoch.
    """
    schedule, facts = config.schedule, stored.facts
    identity = RunIdentity.stored_in(facts)
    kept = _Progress(CheckpointTracker(0, [set() for _ in range(schedule.copies)]), _Replacing())
    registry = Registry(config.placement, config.labels, unused_incarnation(now) if config.restarts else 0)
    if _REGISTRY in facts:
        registry.restore(facts[_REGISTRY], now)
        kept = msgspec.convert(facts[_REGISTRY], _Progress)
    ledger = Ledger(schedule.copies, schedule.microbatches, config.log_every, last=schedule.stages - 1)
    ledger.restore(stored.finished, stored.losses)
    if kept.checkpoints.settled < 0:
        kept.checkpoints.settle()
    ledger.reach(kept.checkpoints.complete)  # a checkpoint found on the disks may be ahead of the records
    replacements = Replacements(kept.replacing.gaps)
    replacements.in_a_row.update(dict(kept.replacing.in_a_row))
    replacements.ever.update(dict(kept.replacing.ever))
    replacements.restart_deadlines(now)
    evaluations = Evaluations(config.criterion)
    for record in stored_in(facts):
        evaluations.add(record)
    outcome = msgspec.convert(facts["outcome"], RunOutcome) if facts.get("outcome") else None
    if outcome is not None and outcome.phase is RunPhase.FINISHED:
        for member in registry.members.values():
            member.recall_finished()
    return RunState(
        run,
        config,
        store,
        RunKeys(run) if identity is None else identity.keys,  # none without a stored key
        identity is not None and identity.adopted,
        registry,
        ledger,
        kept.checkpoints,
        replacements,
        evaluations,
        OrderBook.stored_in(facts),
        StartSearch(config.placement),
        Standstill(config.lease),
        deque(kept.attempts, KEPT_LOSSES),
        Milestones(kept.milestones),
        outcome,
        config.length,
        Trend.of(len(schedule.placement), facts.get(_TREND)),
        PauseBook.stored_in(facts),
    )


def unused_incarnation(now: float) -> int:
    """Return an incarnation above all given out before `now`: no broker gives out one a millisecond."""
    return int(now * 1000)


def save(run: RunState) -> None:
    """Store which worker has which place, the checkpoints and the replacements, in one write."""
    run.store.put(_REGISTRY, facts_of(run))


def facts_of(run: RunState) -> Fact:
    """Return the fact that `save` stores."""
    counts = run.replacements
    replacing = _Replacing(list(counts.pending.values()), list(counts.in_a_row.items()), list(counts.ever.items()))
    progress = _Progress(run.checkpoints, replacing, list(run.lost_work), list(run.milestones))
    return {**run.registry.facts(), **msgspec.to_builtins(progress, order="deterministic")}


def add_evaluation(run: RunState, record: EvaluationRecord) -> bool:
    """Store the result of a round of evaluation; return False if it is known. Raises as `Evaluations.add` does."""
    new = run.evaluations.add(record)
    if new:
        run.store.put(fact_name(record), fact_of(record))
    return new


def go_back(run: RunState, lost: Iterable[Member], stages: Iterable[int], why: str, now: float) -> None:
    """Send `stages` back to the complete checkpoint, and note the work that `lost` members lose by it.

    Args:
        run: The state; the lost work is noted while its ledger still has it.
        lost: Members that have lost their places.
        stages: Stages that begin at the complete checkpoint again.
        why: The end of a sentence about a lost worker.
        now: Seconds since the epoch.
    """
    step, gone = run.checkpoints.complete, list(stages)
    for member in lost:
        run.lost_work.extend(lost_attempts(member, run.ledger, step, why, now))
        what: Literal["loss", "leave"] = "loss" if member.leaving is None else "leave"
        run.milestones.append(Milestone(what, member.exited[0] if member.exited else now, step, member.index, why))
    run.checkpoints.forget(gone)
    run.ledger.go_back(gone, step)
    run.store.go_back(gone, step)
    save(run)


def keep_observation(run: RunState, now: float, behind: float = 0.0) -> None:
    """Store what only this process knows, for queries after its end. Call it about once a second.

    Args:
        run: The state.
        now: Seconds since the epoch.
        behind: Seconds by which that is behind the system's clock.
    """
    run.store.put(OBSERVED, _observe(run, now, behind))
    members, workers = run.registry.members, range(len(run.config.schedule.placement))
    placed = (members.get(index) for index in workers)
    reports = [each.report if each is not None and each.status in _RUNS else None for each in placed]
    if run.trend.note(reports, now) or run.outcome is not None:
        run.store.put(_TREND, msgspec.to_builtins(run.trend.facts()))


def _observe(run: RunState, now: float, behind: float) -> Fact:
    members = [_observed(member) for member in run.registry.members.values()]
    oddities, damaged = dict(run.events.anomalies), list(run.search.damages)
    seen = Observation(now, run.training_steps, oddities, damaged, members, list(_open_microbatches(run)), behind)
    found: Fact = msgspec.to_builtins(seen, str_keys=True)
    return found


def recall(run: RunState, facts: Mapping[str, Fact]) -> None:
    """Complete a state that was restored from `facts` by the stored observation, if there is one.

    Nothing is taken for a worker whose place was given to another afterwards. Raises `msgspec.ValidationError` if the
    observation is not valid.
    """
    if not (fact := facts.get(OBSERVED)):
        return
    seen = msgspec.convert(fact, Observation)
    run.learn_steps(seen.training_steps)
    run.events.anomalies.update(seen.oddities)
    for damage in seen.damaged:
        run.search.note_damage(damage)
    for each in seen.members:
        if (member := run.registry.current(each.incarnation)) is not None:
            sender = member.sender or b"recorded"  # else it would count as not heard of since a restart
            run.registry.members[member.index] = replace(member, sender=sender, **msgspec.structs.asdict(each))
    for entry in seen.microbatches:
        _reopen(run.ledger, entry)


def recall_steps(run: RunState, facts: Mapping[str, Fact]) -> None:
    """Take back the number of steps that a run which is over has trained."""
    if fact := facts.get(OBSERVED):
        run.learn_steps(msgspec.convert(fact, Observation).training_steps)


def _observed(member: Member) -> _ObservedMember:
    report = member.report and msgspec.structs.replace(member.report, steps=[], events=[], snapshots=[], evaluations=[])
    seen = member.last_seen, member.last_progress, member.activity_since
    return _ObservedMember(member.incarnation, member.status, *seen, member.exited, report)


def _open_microbatches(run: RunState) -> Iterator[_ObservedMicrobatch]:
    for stage in range(run.config.schedule.copies):
        for held in run.ledger.unfinished(stage):
            at, entry = held.position, held.entry
            if entry.since is not None and entry.holder is not None:
                event = Event(at.stage, at.step, at.microbatch, str(entry.state), entry.since)
                yield _ObservedMicrobatch(event, entry.holder)


def _reopen(ledger: Ledger, entry: _ObservedMicrobatch) -> None:
    """Take back a microbatch, unless its step is finished: the records are newer than the observation."""
    event = entry.event
    if 0 <= event.stage < len(ledger.finished) and event.step >= ledger.finished[event.stage]:
        try:
            ledger.enter(event, entry.holder)
        except IllegalTransition as error:
            raise msgspec.ValidationError(str(error)) from error
