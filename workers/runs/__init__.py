"""Folder of a run: its name, files, process, metrics, result and records.

May import `disk`, `broker` and `pipeline`. Read `folder.py` first.
"""
