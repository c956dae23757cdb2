"""Queues over a Redis or Valkey server: one stream for each queue, two threads for each worker.

May import the files of `queues`. Read `queues.py` first.
"""
