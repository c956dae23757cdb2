"""Transports between workers that are connected directly: shared memory on one machine, ZeroMQ across machines.

May import everything of broker below it. Read `shm_queues.py` first, then `shm_packets.py`.
"""
