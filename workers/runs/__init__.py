"""The folder of a run: its name, its files, the process it belongs to, its metrics, its result, what its records tell.

May import `disk`, `broker` and `pipeline`. Read `folder.py` first.
"""
