"""A stage's state: its tensors by the unsplit model's names, their copy as a value, and which weights a forward reads.

May import `stage/layers`, `stage/update`, `tree` and `errors`. Read `stage_state.py` first, then `versions.py`.
"""
