"""The records that a broker needs after it was killed, and where they are kept.

May import `control`. Read `base.py` first.
"""
