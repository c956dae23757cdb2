"""Which worker has which place of the plan, under which incarnation, which are lost, and which stand by. Pure.

May import `control` and `ledger`. Read `registry.py` first, then `failure_detector.py`.
"""
