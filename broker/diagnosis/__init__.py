"""The waits between workers with their causes, and the last work of a lost worker, as text for people. Pure.

May import `control` and `ledger`. Read `wait_graph.py` first.
"""
