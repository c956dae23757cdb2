"""The broker's decisions, and the loop that carries them out.

May import every room of `broker`. Read `run_state.py` first, then `coordinator.py`.
"""
