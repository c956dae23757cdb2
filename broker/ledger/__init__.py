"""The record of every microbatch's state at every stage. Pure: no clock, no I/O.

May import `control` and `pipeline.schedule`. Read `ledger.py` first.
"""
