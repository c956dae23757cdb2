"""A schedule that is written down, as rows of cells in a file: read, and refused with everything that is wrong with it.

May import `schedule/actions`. Read `rows.py` first, then `faults.py`.
"""
