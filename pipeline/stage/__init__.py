"""Computes one stage: forward with a stash, backward from an output-gradient, update.

May import `stage/layers`, `pipeline/features` and what these may. Read `stage.py` first, then the files it names.
"""
