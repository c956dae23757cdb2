"""Schedules as data: for every worker, the list of actions it runs in a step, decided before the run.

Every schedule runs a stage's forwards, and its backwards, in ascending order of microbatches. May import `errors`.
Read `value.py`, then `catalogue.py`; `check` proves what is true of a schedule.
"""

from .action import ENDS_MICROBATCH, ONCE_PER_STEP, Action, Kind
from .alternating import window_for
from .catalogue import forward_only, make_schedule, schedule_names
from .greedy_v import Times
from .shape import Placement, ScheduleRefused
from .ties import Tied, Ties
from .v_shaped import v_shaped
from .value import Mode, Schedule

__all__ = [
    "ENDS_MICROBATCH",
    "ONCE_PER_STEP",
    "Action",
    "Kind",
    "Mode",
    "Placement",
    "Schedule",
    "ScheduleRefused",
    "Tied",
    "Ties",
    "Times",
    "forward_only",
    "make_schedule",
    "schedule_names",
    "v_shaped",
    "window_for",
]
