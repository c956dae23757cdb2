"""Computes one stage: forward with a stash, backward from an output-gradient, update.

May import `tree` and `errors`. Read `stage.py` first, then the files it names.
"""
