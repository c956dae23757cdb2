"""A worker's connection to the broker, and the client that commands use.

May import `runtime` and `checkpoint`. Read `control_thread.py` first.
"""
