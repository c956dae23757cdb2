"""Answer for monitoring systems: the numbers of a run, from what its broker knows, without a look into the store."""

from collections.abc import Mapping
from math import isfinite

import msgspec

from stageline.broker.control.measures import QueueMeasures, RunMeasures, StageMeasures, WorkerMeasures
from stageline.broker.ledger.counters import BOUNDS
from stageline.broker.ledger.member import Flowing, MemberStatus

from .pacing import pace_of
from .queue_queries import queue_counts
from .run import RunPhase
from .state import RunState

_IN_ROW = ("ready", "in_flight", "retained", "bytes", "credit_used", "credit_limit", "resent", "oldest")


def measures(run: RunState, of: Mapping[str, str], now: float) -> dict[str, object]:
    """Return the numbers of the run, as `RunMeasures` has them."""
    pace, counters = pace_of(run, now), run.counters
    bubble = pace["bubble"]
    shares: Mapping[str, float | None] = bubble if isinstance(bubble, Mapping) else {}
    best = pace["best"]
    found = RunMeasures(
        run=run.id,
        name=run.config.name,
        schedule=run.config.schedule.name,
        mode=str(run.config.schedule.mode),
        phase=str(run.phase),
        paused=run.pauses.present is not None,
        stalled=_stalled(run, now),
        began=counters.began,
        steps=counters.steps,
        finished=run.ledger.finished_floor,
        planned=run.training_steps,
        bounds=list(BOUNDS),
        took=list(counters.step_seconds.counts),
        took_seconds=counters.step_seconds.sum,
        best=best if isinstance(best, float) else None,
        bubble=shares.get("measured"),
        planned_bubble=shares.get("planned"),
        loss=None if run.ledger.finished_loss is None else run.ledger.finished_loss[1],
        gradient_norm=None if run.ledger.last_norm is None else run.ledger.last_norm[1],
        evaluation={name: each if isfinite(each) else str(each) for name, each in run.evaluations.metrics.items()},
        checkpoint=run.checkpoints.complete if run.config.snapshots else None,
        checkpoint_at=max((each.at for each in run.milestones if each.what == "checkpoint"), default=None),
        faulty=bool(run.fault),
        recovering=len(run.replacements.pending),
        recoveries=counters.recoveries,
        recovery_seconds=counters.recovering,
        oddities=dict(run.events.anomalies),
        workers=[_worker(run, index, now) for index in range(len(run.config.schedule.placement))],
        stages=list(_stages(run)),
        queues=list(_queues(run, now)),
    )
    facts: dict[str, object] = msgspec.to_builtins(found)
    return facts


def _stalled(run: RunState, now: float) -> float | None:
    """Return the seconds since the newest step, or since the end of a later pause; None if the run does not go on."""
    found = run.counters.stalled(now)
    if run.phase is not RunPhase.RUNNING or run.pauses.present is not None or found is None:
        return None
    ends = (each.until for each in run.pauses.pauses if each.until is not None)
    return min([found, *(max(0.0, now - end) for end in ends)])


def _worker(run: RunState, index: int, now: float) -> WorkerMeasures:
    member, losses = run.registry.members.get(index), run.replacements.ever[index]
    if member is None:
        return WorkerMeasures(worker=index, present=False, losses=losses)
    report = member.report
    present = member.status in (MemberStatus.PRESENT, MemberStatus.FINISHED)
    measured = WorkerMeasures(
        worker=index, present=present, losses=losses, heard=max(0.0, now - member.last_seen) if present else None
    )
    if report is None:
        return measured
    return msgspec.structs.replace(
        measured,
        idle=report.idle,
        actions=report.actions,
        memory=report.memory or None,
        retained=report.retained_bytes,
        faulty=bool(report.fault),
        cut_off=bool(report.trouble),
        ahead=None if report.clock is None else report.clock[0],
    )


def _stages(run: RunState) -> list[StageMeasures]:
    schedule = run.config.schedule
    return [
        StageMeasures(
            stage=schedule.label(copy),
            worker=schedule.owner(copy),
            steps=counted.steps,
            computed=counted.computed,
            waited={cause.name.lower(): seconds for cause, seconds in counted.waited.items()},
        )
        for copy, counted in sorted(run.counters.stages.items())
        if copy < schedule.copies
    ]


def _queues(run: RunState, now: float) -> list[QueueMeasures]:
    found = []
    for row, depth, intake in queue_counts(run, now):
        counted = {name: getattr(row, name) for name in _IN_ROW}
        measured = QueueMeasures(
            queue=row.queue,
            put=run.counters.passed(row.queue, Flowing.PUT),
            taken=run.counters.passed(row.queue, Flowing.TAKEN),
            put_bytes=None if depth is None else depth.put_bytes,
            duplicates=None if intake is None else intake.duplicates,
            damaged=None if intake is None else intake.damaged,
            lost=None if intake is None else intake.lost,
            **counted,
        )
        found.append(measured)
    return found
