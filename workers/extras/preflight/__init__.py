"""Checks before a run: needs of a plan, agreement of two trials, this machine.

May import `runtime`, `disk` and `fitting`. Read `trial.py` first, which runs in a process of its own, then
`dry_run.py` and `trial_result.py`. `trials.py` starts and watches that process.
"""
