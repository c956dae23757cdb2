"""Files on disk: atomic writes, writing in the background of the compute loop, and tensors kept bit for bit.

May import `pipeline`; any other room of `workers` may import this one. Read `atomic_file.py` first.
"""
