"""A model as an ordered list of layers: the families of models that are known, and what a user writes for another.

May import `stage`, and the files of `pipeline` itself. Read `layers.py`, then `known.py`.
"""
