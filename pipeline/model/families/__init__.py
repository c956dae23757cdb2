"""Models as ordered lists of layers: the families that are known, and the classes with which users describe others.

May import `stage`, and the files of `pipeline` itself. Read `layers.py`, then `known.py`.
"""
