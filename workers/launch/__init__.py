"""Launch of a run on this machine: its processes are started, watched, started again, and ended.

May import `process`, `preflight` and `runs`. Read `launch.py` first.
"""
