"""Which evaluation of a run is the best so far, and after which one a run stops early: decided by their figures alone.

Imports nothing of stageline. Read `standing.py`.
"""

from .standing import Better, Criterion, Score, Standing

__all__ = ["Better", "Criterion", "Score", "Standing"]
