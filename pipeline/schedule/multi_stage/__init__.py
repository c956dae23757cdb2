"""Schedules for workers that own several stages: stages that loop over the workers, or lie on them in a V.

May import `schedule/actions` and `errors`. Read `interleaved.py` first, then `v_shaped.py`.
"""
