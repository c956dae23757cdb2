"""Output of the frozen first stages, kept on disk by sample for later epochs.

May import `runtime`, `runs` and `disk`. Read `cache.py` first, then `opening.py`.
"""
