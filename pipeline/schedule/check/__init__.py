"""Checks schedules: complete, in order, free of deadlock; and how long they take and how much they hold."""

from .costs import Costs
from .errors import Deadlock, Disordered, Incomplete, UnsoundSchedule
from .timing import Timed
from .verdict import Verdict, check_schedule

__all__ = ["Costs", "Deadlock", "Disordered", "Incomplete", "Timed", "UnsoundSchedule", "Verdict", "check_schedule"]
