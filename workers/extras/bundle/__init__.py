"""Bundles for bug reports: archives of what commands tell of a run, without secrets.

Read first: `archive.py`.
"""
