"""Retained queues between stages: the promise in `base.py`, one backend for each transport.

May import `codec` and `network`. Read `base.py` first, then `delivery.py`, which decides for every transport.
"""
