"""When a run evaluates, which evaluation is the best so far, and after which one the run stops early.

Decided by figures alone. Imports nothing of stageline. Read `rounds.py`, when a run evaluates, then `standing.py`.
"""

from .rounds import Better, Criterion, Rounds, Score, Standing

__all__ = ["Better", "Criterion", "Rounds", "Score", "Standing"]
