"""What a plan comes to before it runs, and whether this machine can run it.

May import `runtime`. Read `estimate.py` first.
"""
