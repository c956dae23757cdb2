"""What schedules are made of: actions, what each comes after at its stage, and the shape that a schedule is for.

May import `errors`. Read `action.py` first.
"""
