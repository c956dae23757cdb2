"""Retained queues between stages: the promise in `base.py`, and what all transports share.

May import `codec` and `control`. Read `base.py` first, then `delivery.py`, which decides for every transport.
"""
