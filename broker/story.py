"""Where one microbatch has been, or is: its state at every stage, and when each action on it began and ended."""

import struct
from collections.abc import Callable

from pipeline.schedule import Action, Kind, Schedule

from .control import StepRecord
from .ledger import ACTION_BYTES, Entry, Ledger, Place

Timed = tuple[Action, float, float]  # an action, its start and its end in seconds since the epoch


def timed_actions(schedule: Schedule, record: StepRecord) -> list[Timed]:
    """Each action of a finished step at a stage, with its times; none if they were not measured.

    How many there are tells which list the stage ran: its step of the schedule, a frozen stage's, or evaluation's.
    """
    times = struct.unpack(f"<{len(record.times) // 8}d", record.times)
    actions = _lists_by_length(schedule, record.stage).get(len(record.times) // ACTION_BYTES, [])
    return list(zip(actions, times[0::2], times[1::2], strict=True)) if actions else []


def story(
    ledger: Ledger,
    schedule: Schedule,
    record: Callable[[int, int], StepRecord | None],
    step: int,
    microbatch: int,
) -> list[dict[str, object]]:
    """One entry per stage, as JSON's own types. `record` finds a finished step of a stage, None if it is not kept."""
    return [
        _chapter(ledger.entry(Place(stage, step, microbatch)), schedule, record(stage, step), stage, microbatch)
        for stage in range(schedule.stages)
    ]


def _chapter(
    entry: Entry, schedule: Schedule, record: StepRecord | None, stage: int, microbatch: int
) -> dict[str, object]:
    timed = timed_actions(schedule, record) if record else []
    own = [each for each in timed if each[0].microbatch == microbatch or each[0].kind is Kind.UPDATE]
    return {
        "stage": stage,
        "worker": schedule.owner(stage),
        "state": str(entry.state),
        "since": own[-1][2] if own else entry.since,
        "holder": {"name": entry.holder.name, "incarnation": entry.holder.incarnation} if entry.holder else None,
        "actions": [{"action": str(action), "start": start, "end": end} for action, start, end in own],
    }


def _lists_by_length(schedule: Schedule, stage: int) -> dict[int, list[Action]]:
    training = [action for action in schedule.workers[schedule.owner(stage)] if action.stage == stage]
    evaluation = [Action(Kind.FORWARD, stage, microbatch) for microbatch in range(schedule.microbatches)]
    frozen = [*evaluation, Action(Kind.UPDATE, stage)]
    return {len(actions): actions for actions in (evaluation, frozen, training)}
