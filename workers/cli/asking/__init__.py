"""Commands' way to a run: they look at it once or again and again, read its logs, pause it, and export messages of it.

May import `workers.cli` and what that may. Read first: `looking.py`.
"""
