"""Threads that keep a run in order leave the processor to those that compute.

A thread that wakes up for a message usually interrupts what runs there. What the broker and the calls of a script do is
never what a worker waits for next: they take their turn instead (SCHED_BATCH of Linux, sched(7)), and lose no share.
"""

import os
from contextlib import suppress


def wait_for_turn() -> None:
    """From now on the calling thread, and those that it starts, do not interrupt others when they wake up. Does nothing
    where the system cannot do this, or does not allow it."""
    if hasattr(os, "SCHED_BATCH"):
        with suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
