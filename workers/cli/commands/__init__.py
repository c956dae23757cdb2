"""The commands: each parses, calls one function, prints. Those that the broker answers are in `queries.py`.

May import every other room. Read `train.py` first.
"""
