"""Checks before a run: what a plan comes to, whether two trials of it agree, whether this machine can run it.

May import `runtime`, `process` and the rooms in here: `results`, `measuring` and `memory`. Read `trial.py` first, which
runs in a process of its own, then `estimate.py`. `launch/trials.py` starts and watches that process.
"""
