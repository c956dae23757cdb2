"""Loads the objects that a plan names: from the user's files, from packages, and from the script it was forked from.

May import `data`, `plan`, and the files of `pipeline` itself. Read `load.py` first.
"""
