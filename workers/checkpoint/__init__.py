"""Snapshots: one stage's state at a step boundary, on disk, and how a worker takes and restores them.

May import `disk`, `runtime` and `runs`. Read `hooks.py` first.
"""
