"""Features that stages compute, one file each: see `pipeline/feature.py`.

May import `pipeline/stage/layers` and the packages that it may import.
"""

BUILT_IN = ("replicas", "ties", "clipping")  # names that features of a user may be `inside` or `outside` of
