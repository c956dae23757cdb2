"""The processes that compute a stage together: forked by the worker that leads them, which hands each call to them.

May import `runtime`, `control`, `checkpoint` and `pipeline`. Read `group.py` first.
"""
