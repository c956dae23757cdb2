"""Queues over ZeroMQ sockets: the producer binds and retains, the consumer connects and asks.

May import the files of `queues`. Read `queues.py` first.
"""
