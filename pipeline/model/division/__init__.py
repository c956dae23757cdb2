"""Decides before which layers a model is cut: where the plan says, or so that its stages cost about the same.

May import `families`, `plan`, `stage`, and the files of `pipeline` itself. Read `edges.py`, then `partition.py`.
"""
