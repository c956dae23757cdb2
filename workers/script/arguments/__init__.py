"""What a `Line` is given: arguments, batches and weights are checked, and the arguments made into a plan.

May import the rooms up to `launch`. Read `script_plan.py` first.
"""
