"""What a `Line` is given: arguments, batches and weights are checked, and the arguments made into a plan.

May import the rooms up to `launch`. Read `arguments.py`, the table of arguments, first.
"""
