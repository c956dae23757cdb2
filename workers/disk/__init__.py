"""How files are written: atomically, in the background of the compute loop, and tensors without losing a bit.

May import `pipeline`; any other room of `workers` may import this one. Read `atomic_file.py` first.
"""
