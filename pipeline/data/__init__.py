"""(seed, step) gives a batch; a batch gives microbatches, the same on every machine.

May import `tree`. Read `source.py` first.
"""
