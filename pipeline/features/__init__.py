"""Features of a run that stages compute, one file each: see `pipeline/feature.py`.

May import `pipeline/stage` and what that may.
"""
