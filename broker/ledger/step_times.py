"""When each action of a finished step began and ended."""

import struct

from stageline.broker.control.protocol import StepRecord
from stageline.pipeline.schedule import Action, Kind, Schedule

from .ledger import ACTION_BYTES

TimedAction = tuple[Action, float, float]  # an action, its start and its end in seconds since the epoch


def timed_actions(schedule: Schedule, record: StepRecord) -> list[TimedAction]:
    """Each action of a finished step at a stage, with its times; none if they were not measured.

    Their number tells which list the stage ran: its step of the schedule, a frozen stage's, or evaluation's.
    """
    stage, times = record.stage, struct.unpack(f"<{len(record.times) // 8}d", record.times)
    training = [action for action in schedule.workers[schedule.owner(stage)] if action.stage == stage]
    evaluation = [Action(Kind.FORWARD, stage, microbatch) for microbatch in range(schedule.microbatches)]
    frozen = [*evaluation, Action(Kind.UPDATE, stage)]
    by_length = {len(actions) * ACTION_BYTES: actions for actions in (evaluation, frozen, training)}
    actions = by_length.get(len(record.times))
    return list(zip(actions, times[0::2], times[1::2], strict=True)) if actions else []
