"""A run's model on data: predictions, loss and metrics, by the stages of its plan.

May import `script`, `exchange` and below. Read `forward_run.py` first.
"""
