"""Commands' way to a run: questions, logs, a pause, an export of messages.

May import `workers.cli` and what that may. Read first: `looking.py`.
"""
