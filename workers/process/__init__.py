"""Processes of a run from start to end: a worker, the broker, or the whole run in one process.

May import `runtime`, `control`, `checkpoint`, `replay` and `runs`. Read
`worker_process.py` first.
"""
