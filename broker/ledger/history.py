"""Where one microbatch has been, or is: its state at every stage, and when each action on it began and ended."""

import struct
from collections.abc import Callable
from dataclasses import dataclass

from stageline.broker.control.protocol import StepRecord
from stageline.broker.stores.base import Fact
from stageline.pipeline.schedule import Action, Kind, Schedule

from .ledger import ACTION_BYTES, Ledger, LedgerEntry, WorkPosition

Timed = tuple[Action, float, float]  # an action, its start and its end in seconds since the epoch


def timed_actions(schedule: Schedule, record: StepRecord) -> list[Timed]:
    """Each action of a finished step at a stage, with its times; none if they were not measured.

    How many there are tells which list the stage ran: its step of the schedule, a frozen stage's, or evaluation's.
    """
    times = struct.unpack(f"<{len(record.times) // 8}d", record.times)
    actions = _lists_by_length(schedule, record.stage).get(len(record.times) // ACTION_BYTES, [])
    return list(zip(actions, times[0::2], times[1::2], strict=True)) if actions else []


@dataclass(frozen=True, slots=True)
class Sources:
    """What a story is told from.

    `record` finds a finished step of a stage, None if it is not kept. `attempts` tells what was computed and lost.
    `life` says which of the workers that have had a place works under an incarnation now, None if none does.
    """

    ledger: Ledger
    schedule: Schedule
    record: Callable[[int, int], StepRecord | None]
    attempts: Callable[[WorkPosition], list[Fact]]
    life: Callable[[int], int | None]


def history(sources: Sources, step: int, microbatch: int) -> list[Fact]:
    """One entry per stage, as JSON's own types."""
    return [_chapter(sources, WorkPosition(stage, step, microbatch)) for stage in range(sources.schedule.stages)]


def _chapter(sources: Sources, place: WorkPosition) -> Fact:
    entry, record = sources.ledger.entry(place), sources.record(place.stage, place.step)
    timed = timed_actions(sources.schedule, record) if record else []
    own = [each for each in timed if each[0].microbatch == place.microbatch or each[0].kind is Kind.UPDATE]
    return {
        "stage": place.stage,
        "worker": sources.schedule.owner(place.stage),
        "attempts": sources.attempts(place),  # those before
        "state": str(entry.state),
        "since": own[-1][2] if own else entry.since,
        "holder": _holder(entry, sources),
        "actions": [{"action": str(action), "start": start, "end": end} for action, start, end in own],
    }


def _holder(entry: LedgerEntry, sources: Sources) -> Fact | None:
    who = entry.holder
    return {"name": who.name, "life": sources.life(who.incarnation), "incarnation": who.incarnation} if who else None


def _lists_by_length(schedule: Schedule, stage: int) -> dict[int, list[Action]]:
    training = [action for action in schedule.workers[schedule.owner(stage)] if action.stage == stage]
    evaluation = [Action(Kind.FORWARD, stage, microbatch) for microbatch in range(schedule.microbatches)]
    frozen = [*evaluation, Action(Kind.UPDATE, stage)]
    return {len(actions): actions for actions in (evaluation, frozen, training)}
