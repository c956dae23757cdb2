"""Where a run goes on after a loss: the complete checkpoint, lost records, a resumed run. Pure: no clock, no I/O.

May import `control`, `ledger` and `membership`. Read `checkpoint_tracker.py` first.
"""
