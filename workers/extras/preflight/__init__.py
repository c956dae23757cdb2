"""Checks before a run: what a plan needs, whether two trials of it agree, whether this machine can run it.

May import `runtime`, `disk` and `fitting`. Read `trial.py` first, which runs in a process of its own, then
`dry_run.py` and `trial_result.py`. `trials.py` starts and watches that process.
"""
