"""What people see of a script's run: progress and news on stderr, a line in a notebook, the timetable of a step.

May import the rooms up to `launch`. Read `display.py` first.
"""
