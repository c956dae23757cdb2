"""Who is which worker of the plan, under which incarnation, and who is lost. Pure: no clock, no I/O.

May import `control` and `ledger`. Read `registry.py` first.
"""
