"""Which worker waits for which, why, and what a lost worker was doing, as text for people. Pure.

May import `control`, `ledger` and `membership`. Read `wait_graph.py` first.
"""
