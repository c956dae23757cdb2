"""A Redis or Valkey server as a transport: queues in streams, the broker's channel, the broker's store.

May import everything of broker below it. Read `queues.py` first: one stream for each queue, two
threads for each worker.
"""
