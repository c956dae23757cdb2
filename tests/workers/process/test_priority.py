"""What a thread asks of the system's scheduler is asked for that thread alone."""

import os
import threading
from concurrent.futures import ThreadPoolExecutor

from stageline.workers.process.priority import wait_for_turn


def test_a_thread_waits_for_its_turn_and_the_others_do_not() -> None:
    def policy_of_this_and_of_one_that_it_starts() -> tuple[int, int]:
        wait_for_turn()
        with ThreadPoolExecutor(1) as inner:
            return os.sched_getscheduler(threading.get_native_id()), inner.submit(os.sched_getscheduler, 0).result()

    before = os.sched_getscheduler(0)
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(policy_of_this_and_of_one_that_it_starts).result() == (os.SCHED_BATCH, os.SCHED_BATCH)
    assert os.sched_getscheduler(0) == before
