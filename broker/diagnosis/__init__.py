"""Why a run waits: the chain of waits down to its root, in words. Pure: no clock, no I/O.

May import `control`, `ledger` and `membership`. Read `wait_graph.py` first.
"""
