"""Files on disk: atomic writes, a background writer, and tensors kept bit for bit.

May import `pipeline`; any other room of `workers` may import this one. Read `atomic_file.py` first.
"""
