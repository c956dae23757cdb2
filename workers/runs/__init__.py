"""The folder of a run: its name, its files, the process it belongs to, its result.

May import `disk`, `broker` and `pipeline`. Read `folder.py` first.
"""
