"""Layers of a stage and what they compute with: weights, memory of their own, precision, random generators.

May import `tree` and `errors`. Read `layer.py` first, then `body.py`.
"""
