"""`stageline top`: facts, panels made of them, and the screen.

May import `workers.cli`, its rooms `asking` and `tables`, and what these may. Read first: `panels.py`.
"""
