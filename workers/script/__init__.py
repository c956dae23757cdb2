"""stageline from a script: `Line` drives stages step by step, `train` runs a plan.

May import every room but `cli`. Read `line.py` first.
"""
