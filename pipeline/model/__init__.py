"""Loads the model, loss and data that a plan names, and cuts the model into stages.

May import `plan`, `stage`, and the files of `pipeline` itself. Read `load.py`, then `cut.py`.
"""
