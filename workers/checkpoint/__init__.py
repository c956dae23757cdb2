"""Snapshots: one stage's state at a step boundary, on disk, and how a run uses them.

May import `runtime` and `runs`. Read `hooks.py` first.
"""
