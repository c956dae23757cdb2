"""Output of the frozen first stages, kept on the disk by sample, and given to the stage after them in later epochs.

May import `runtime`, `runs` and `disk`. Read `cache.py` first, then `opening.py`.
"""
