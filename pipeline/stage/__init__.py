"""Computes one stage: forward with a stash, backward from an output-gradient, update.

May import `stage/layers`, `stage/update`, `stage/state`, `stage/backward`, `tree` and `errors`. Read `stage.py` first,
then the files it names.
"""
