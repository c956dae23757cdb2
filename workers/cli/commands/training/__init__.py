"""The commands that train: all processes of a run on this machine, or one of them.

May import every room below the commands. Read `train.py` first.
"""
