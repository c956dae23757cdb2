"""What stages and layers take: trains a microbatch through all of them in this process, or each layer by itself.

May import `runtime` and `preflight/results`. Read `dry_run.py` first.
"""
