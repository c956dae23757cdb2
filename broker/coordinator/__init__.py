"""Every decision about a run: messages and the time come in, messages go out. Pure.

May import every room of `broker`. Read `run_state.py` first, then `coordinator.py` and `records.py`.
"""
