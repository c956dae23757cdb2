"""A worker's side of the conversation with the broker, and the client of the commands.

May import `runtime`. Read `control_thread.py` first.
"""
