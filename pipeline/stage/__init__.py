"""Stages: each computes forward with a stash, backward from an output's gradient, and updates.

May import `stage/layers`, `pipeline/features` and what these may. Read `stage.py` first, then the files it names.
"""
