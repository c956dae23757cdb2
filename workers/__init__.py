"""The processes of a run, what they keep on disk, and the commands that start and inspect them.

May import `broker` and `pipeline`. Read `runtime/loop.py` first.
"""
