"""Features that stages compute, one file each: see `pipeline/feature.py`.

May import `pipeline/stage/layers` and what that may.
"""

BUILT_IN = ("replicas", "ties", "clipping")  # names that features of a user may be `inside` or `outside` of
