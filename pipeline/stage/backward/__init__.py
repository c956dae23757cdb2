"""What a backward needs of its forward: kept in a stash or in files, or computed again; and a backward in two halves.

May import `stage/layers`, `stage/state`, `tree` and `errors`. Read `stash.py` first.
"""
