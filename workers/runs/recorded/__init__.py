"""What the records in a run's folder tell of it when no broker answers.

May import `runs`, `broker` and `pipeline`. Read `records.py`, then `recorded_answer.py`.
"""
