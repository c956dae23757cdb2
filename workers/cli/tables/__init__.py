"""Facts about runs as lines and tables for people, within the columns of a terminal.

May import `workers.cli` and what that may. Read first: `answers.py`.
"""
