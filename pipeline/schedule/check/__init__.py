"""Proves that a schedule is complete, in order and free of deadlock; computes its times and its peaks in memory.

May import `schedule`. Read `verdict.py` first.
"""

from .complete import Disordered, Incomplete, UnsoundSchedule
from .timing import Costs, Deadlock, Timed
from .verdict import Verdict, check_schedule

__all__ = ["Costs", "Deadlock", "Disordered", "Incomplete", "Timed", "UnsoundSchedule", "Verdict", "check_schedule"]
