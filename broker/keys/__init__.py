"""Keys: who speaks, in texts that people copy, and what is made of them. Pure, but for a new pair's secret.

May import `broker.errors` and `pipeline.addresses`. Read `pairs.py` first.
"""
