"""The training loop of a script: `Line.fit` steps, evaluates, keeps the best, and stops early.

May import the rooms up to `launch`, `script/arguments` and `script/calls`. Read `loop.py` first.
"""
