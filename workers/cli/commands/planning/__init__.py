"""The commands before a run: they write a plan, check and show it, and examine this machine.

May import every room below the commands. Read `plan.py` first; `trial.py` is the process in which a plan is tried.
"""
