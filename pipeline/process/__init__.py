"""What a process is to the system: forked, waited for, interrupted; where it was when it ended; its sockets' paths.

May import `pipeline`. Read `spawn.py` first, then `fork.py`.
"""
