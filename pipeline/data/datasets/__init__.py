"""Datasets of torch as data sources, and as loaders for a script's own loop: each sample has random numbers of its own.

May import `data`, `process`, and the files of `pipeline` itself. Read `loader.py`, then `samples.py`, `readers.py`.
"""
