"""`stageline audit`: measures what each cut of a model gives away, and what that costs.

Imports `runtime` and `forward`. Read `audit.py`, then `audited_model.py`; the measures are in `measures.py`.
"""
