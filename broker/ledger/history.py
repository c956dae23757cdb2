"""The history of one microbatch: its state at every stage, and when each action on it began and ended."""

import struct
from collections.abc import Callable
from dataclasses import dataclass

from stageline.broker.control.protocol import StepRecord
from stageline.broker.stores.base import Fact
from stageline.pipeline.schedule import Action, Kind, Schedule

from .ledger import ACTION_BYTES, Ledger, MicrobatchPosition

Timed = tuple[Action, float, float]  # an action, its start and its end in seconds since the epoch


def timed_actions(schedule: Schedule, record: StepRecord) -> list[Timed]:
    """Each action of a finished step at a stage, with its times; none if they were not measured.

    Their number tells which list the stage ran: its step of the schedule, a frozen stage's, or evaluation's.
    """
    times = struct.unpack(f"<{len(record.times) // 8}d", record.times)
    actions = _lists_by_length(schedule, record.stage).get(len(record.times) // ACTION_BYTES, [])
    return list(zip(actions, times[0::2], times[1::2], strict=True)) if actions else []


@dataclass(frozen=True, slots=True)
class HistorySources:
    """Where a history is read from.

    `record` finds a finished step of a stage, None if it is not kept. `attempts` lists what was computed and lost.
    `life` counts the workers of a place up to the one that has an incarnation now, None for a stale incarnation.
    """

    ledger: Ledger
    schedule: Schedule
    record: Callable[[int, int], StepRecord | None]
    attempts: Callable[[MicrobatchPosition], list[Fact]]
    life: Callable[[int], int | None]


def history(sources: HistorySources, step: int, microbatch: int) -> list[Fact]:
    """One entry per stage, as JSON's own types."""
    return [_at_stage(sources, MicrobatchPosition(k, step, microbatch)) for k in range(sources.schedule.stages)]


def _at_stage(sources: HistorySources, at: MicrobatchPosition) -> Fact:
    entry, record = sources.ledger.entry(at), sources.record(at.stage, at.step)
    who = entry.holder
    timed = timed_actions(sources.schedule, record) if record else []
    own = [each for each in timed if each[0].microbatch == at.microbatch or each[0].kind is Kind.UPDATE]
    return {
        "stage": at.stage,
        "worker": sources.schedule.owner(at.stage),
        "attempts": sources.attempts(at),  # those before
        "state": str(entry.state),
        "since": own[-1][2] if own else entry.since,
        "holder": who and {"name": who.name, "life": sources.life(who.incarnation), "incarnation": who.incarnation},
        "actions": [{"action": str(action), "start": start, "end": end} for action, start, end in own],
    }


def _lists_by_length(schedule: Schedule, stage: int) -> dict[int, list[Action]]:
    training = [action for action in schedule.workers[schedule.owner(stage)] if action.stage == stage]
    evaluation = [Action(Kind.FORWARD, stage, microbatch) for microbatch in range(schedule.microbatches)]
    frozen = [*evaluation, Action(Kind.UPDATE, stage)]
    return {len(actions): actions for actions in (evaluation, frozen, training)}
