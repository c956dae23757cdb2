"""The parts of a run as its broker knows it: microbatches, members, checkpoints, evaluations, orders. Pure.

May import `control`, `stores`' interface and `pipeline.schedule`. Read `ledger.py` first, then `registry.py`.
"""
