"""What fits into memory: what each worker takes, which schedules it has room for, what stages recompute and offload.

May import `runtime`, `preflight/measuring` and `preflight/results`. Read `memory_choice.py` first. The options are
compared in `pipeline/budget`.
"""
