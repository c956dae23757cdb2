"""The commands, in a room for each purpose: each command parses, calls one function, prints.

May import every other room. Read `training/train.py` first; `app.py` says where each command is.
"""
