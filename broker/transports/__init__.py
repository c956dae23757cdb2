"""Transports, which carry messages between processes and are chosen by the scheme of an address.

May import everything of broker below it. Read `redis/queues.py` for one with a server.
"""
