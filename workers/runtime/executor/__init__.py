"""Carries out a worker's instructions with its stages: losses and metrics in order, bad microbatches left out.

May import `disk`, `broker` and `pipeline`. Read `executor.py` first.
"""
