"""Choice of a run's schedule by the times of its own steps: `schedule.name = "auto"`.

May import `schedule`. Read `measured.py` (times of actions and messages) first, then `ranking.py` (simulates every
schedule with those times) and `review.py` (when to rank, and when to change the schedule).
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
