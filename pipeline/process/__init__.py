"""Processes as the system sees them: forked, waited for, interrupted; and the line of code at which one ended.

May import the files of `pipeline` itself. Read `child.py` first, then `lifeline.py`.
"""
