"""What each worker does in a run, decided before it does it: instructions, with the queues and numbers of messages.

By a schedule, in steps and rounds of evaluation; or by a script's calls. May import `broker` and `pipeline`.
Read `instruction.py` first, then `program.py`.
"""
