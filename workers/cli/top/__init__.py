"""`stageline top`: a thread asks for facts, functions make panels of them, and textual draws these.

May import `workers.cli`, its rooms `asking` and `tables`, and what these may. Read first: `panels.py`.
"""
