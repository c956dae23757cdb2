"""The loop of one worker: a machine that decides, an executor that computes, queues that carry.

May import `disk`, `runs`, `broker` and `pipeline`. Read `loop.py` first.
"""
