"""Folder of a run: its name, its files, the process it belongs to, its metrics, its result, and its records.

May import `disk`, `broker` and `pipeline`. Read `folder.py` first.
"""
