"""Computation of a run and its order: the plan, the schedule, and one stage's computation.

Imports nothing of `broker` or `workers`. Read `stage/stage.py` first; the files here serve all rooms below.
"""
