"""Checks schedules: complete, in order, free of deadlock; and how long they take and how much they hold."""

from .costs import Costs
from .replay import Timed
from .unsound import Deadlock, Disordered, Incomplete, Unsound
from .verdict import Verdict, check

__all__ = ["Costs", "Deadlock", "Disordered", "Incomplete", "Timed", "Unsound", "Verdict", "check"]
