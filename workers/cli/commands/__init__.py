"""One file for each command: it parses, calls one function, prints.

May import every other room. Read `train.py` first.
"""
