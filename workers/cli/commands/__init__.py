"""Commands: each parses, calls one function, prints.

May import every other room. Read `train.py` first; `app.py` says where each command is.
"""
