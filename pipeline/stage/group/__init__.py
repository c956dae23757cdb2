"""A stage that a group of processes computes: how its layers are split among them, and the calls that they make.

May import `pipeline.stage` and what that may. Read `split_stage.py` first, then `splitting.py`.
"""
