"""What a process is to the system: forked, waited for, interrupted; where it was when it ended.

May import the files of `pipeline` itself. Read `fork.py` first, then `lifeline.py`.
"""
