"""Checks before a run: what a plan comes to, and whether this machine can run it.

May import `runtime` and `process`. Read `estimate.py` first; `doctor.py` uses it.
"""
