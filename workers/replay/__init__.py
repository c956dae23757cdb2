"""Records what stages take and give, and runs one microbatch again from it.

May import `runtime`, `checkpoint` and `runs`. Read `replay.py` first.
"""
