"""The folder of a run: its name, its files, its result.

May import `disk`, `broker` and `pipeline`. Read `folder.py` first.
"""
