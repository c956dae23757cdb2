"""Processes that draw batches ahead of their use: forks of this one, which send each batch through a socket.

May import `data/batch.py`, and the files of `pipeline` itself. Read `readers.py` first.
"""
