"""The processes of a run from start to end: a worker, the broker, or all in one.

May import `runtime`, `control`, `checkpoint`, `replay` and `runs`. Read
`worker_process.py` first.
"""
