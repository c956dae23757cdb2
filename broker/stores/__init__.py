"""What the broker must still know after it was killed, and where that is kept.

May import `control` and `network`. Read `base.py` first.
"""
