"""Why a run is slow: findings from the times of its steps, each with remedies. Pure.

May import `ledger` and the rooms below it. Read `steps.py` (what was measured), then `retimed.py` (the same steps
without a cause), `findings.py` (which causes limit the run) and `remedies.py` (what to do, with a simulated gain).
"""
