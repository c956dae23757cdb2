"""Records what stages take and give, and runs one microbatch again from the records.

May import `disk`, `runtime`, `checkpoint` and `runs`. Read `replay.py` first.
"""
