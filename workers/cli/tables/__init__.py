"""Facts about runs as lines and tables for people.

May import `workers.cli` and what that may. Read first: `answers.py`.
"""
