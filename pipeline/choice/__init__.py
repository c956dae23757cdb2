"""Which schedule a run takes, by what its own steps have measured: `schedule.name = "auto"`.

May import `schedule`. Read `measured.py`, what actions and messages take; then `ranking.py`, which simulates
every schedule with those times, and `review.py`, which says when to rank and when to change.
"""

from .measured import MeasuredTimes, StepActions
from .ranking import MOST_HALVING, RankedSchedule, Ranking, StageBytes
from .review import ChosenSchedule, ScheduleReview

__all__ = [
    "MOST_HALVING",
    "ChosenSchedule",
    "MeasuredTimes",
    "RankedSchedule",
    "Ranking",
    "ScheduleReview",
    "StageBytes",
    "StepActions",
]
