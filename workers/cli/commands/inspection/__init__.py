"""The commands that ask about a run, while it goes on and after it. Those that the broker answers are in `queries.py`.

May import every room below the commands. Read `queries.py` first.
"""
