"""One file for each claim about performance: what is compared, and what is found.

Read `throughput.py` first.
"""
