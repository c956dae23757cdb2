"""Schedules as data: for every worker, the list of actions it runs in a step, decided before the run.

What is true of them all: per stage, forwards and backwards each run in ascending microbatch order.
"""

from .action import Action, Kind
from .catalogue import forward_only, make_schedule, schedule_names
from .value import Mode, Placement, Schedule, ScheduleRefused
from .window import window_for

__all__ = [
    "Action",
    "Kind",
    "Mode",
    "Placement",
    "Schedule",
    "ScheduleRefused",
    "forward_only",
    "make_schedule",
    "schedule_names",
    "window_for",
]
