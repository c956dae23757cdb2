"""The decisions about a run: messages and the time come in, messages go out. Pure.

May import every room of `broker`. Read `state.py` first, then `coordinator.py` and `records.py`.
"""
