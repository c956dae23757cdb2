"""Queues between processes of one machine: Unix sockets carry messages, large ones lie in shared memory.

May import the files of `queues`. Read `queues.py` first, then `packets.py`.
"""
