"""Commands' way to a run: questions, logs, pauses, leaves, an export of messages.

May import `workers.cli` and what that may. Read first: `looking.py`.
"""
