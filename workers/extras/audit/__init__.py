"""`stageline audit`: trains a plan's model on this machine, and measures what each cut gives away, and what that costs.

Imports `runtime` and `forward`. Read `audit.py`, then `audited_model.py`; the measures are in `measures.py`.
"""
