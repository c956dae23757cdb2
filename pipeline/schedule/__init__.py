"""Schedules as data: for every worker, the list of actions it runs in a step, decided before the run.

Every schedule runs a stage's forwards, and its backwards, in ascending order of microbatches. May import
`actions`, `listed`, `multi_stage` and `errors`. Read `value.py`, then `catalogue.py`; `check` proves what is true of
a schedule.
"""

from .actions.action import ENDS_MICROBATCH, ONCE_PER_STEP, Action, Kind
from .actions.shape import Placement, ScheduleRefused, Shape
from .alternating import window_for
from .catalogue import WINDOWED, forward_only, make_schedule, schedule_names
from .listed.faults import faults, told_by
from .listed.rows import LISTED, rows_of
from .multi_stage.greedy_v import Times
from .multi_stage.v_shaped import v_shaped
from .value import DELAYED, Mode, Schedule

__all__ = [
    "DELAYED",
    "ENDS_MICROBATCH",
    "LISTED",
    "ONCE_PER_STEP",
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
