"""Which worker waits for which, why, and what a lost worker was doing, as text for people. Pure.

May import `control` and `ledger`. Read `wait_graph.py` first.
"""
