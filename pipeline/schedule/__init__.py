"""Schedules as data: for every worker, the list of actions it runs in a step, decided before the run.

Every schedule runs a stage's forwards in ascending order of microbatches, and its backwards too, unless the schedule
says that they descend. May import `errors`. Read `action.py`, `value.py`, then `catalogue.py`; `pipeline/program`
proves what is true of a schedule.
"""

from .action import ENDS_MICROBATCH, ONCE_PER_STEP, PER_MICROBATCH, Action, Kind
from .alternating import window_for
from .catalogue import WINDOWED, forward_only, make_schedule, schedule_names
from .listed import LISTED, faults, rows_of, told_by
from .shape import Placement, ScheduleRefused, Shape
from .v_shaped import Times, v_shaped
from .value import Schedule
from .versions import DELAYED, Mode

__all__ = [
    "DELAYED",
    "ENDS_MICROBATCH",
    "LISTED",
    "ONCE_PER_STEP",
    "PER_MICROBATCH",
    "WINDOWED",
    "Action",
    "Kind",
    "Mode",
    "Placement",
    "Schedule",
    "ScheduleRefused",
    "Shape",
    "Times",
    "faults",
    "forward_only",
    "make_schedule",
    "rows_of",
    "schedule_names",
    "told_by",
    "v_shaped",
    "window_for",
]
