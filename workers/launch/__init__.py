"""Starts a run's processes on this machine, watches them, starts them again, and ends them.

May import `process`, `preflight` and `runs`. Read `launch.py` first.
"""
