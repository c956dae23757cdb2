"""The parts of a run as its broker knows it: members, checkpoints, evaluations, orders; why a run waits. Pure.

May import `control`, `stores`' interface and `pipeline.schedule`. Read `ledger.py` first, then `registry.py`; for
waits `wait_graph.py`, then `explain.py`.
"""
