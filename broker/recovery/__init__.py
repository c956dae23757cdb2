"""Which state a run continues from after a loss: complete checkpoints, lost records, a resumed run. Pure.

May import `control`, `ledger` and `membership`. Read `checkpoint_tracker.py` first.
"""
