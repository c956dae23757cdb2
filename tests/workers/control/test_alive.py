"""A worker gives signs of life as long as it progresses, by the bounds of its plan."""

import os
import threading
from pathlib import Path

import pytest

from stageline.broker.ledger.losses import Leases
from stageline.pipeline.schedule import make_schedule
from stageline.workers.control.alive import TOUCH, Liveness, Pulse, Signs
from stageline.workers.runtime.progress import Progress
from stageline.workers.runtime.queue_counter import QueueCounts
from support.programs import calls_of

LEASES = Leases(silence=10.0, action=100.0, loading=300.0)


@pytest.mark.parametrize(
    ("turn", "waits", "bound"),
    [(0.0, True, LEASES.loading), (5.0, False, LEASES.action), (5.0, True, LEASES.silence)],
    ids=["loads", "computes", "waits"],
)
def test_a_loop_without_a_new_sign_is_alive_for_as_long_as_its_work_may_take(turn: float, waits: bool, bound: float):
    liveness, signs = Liveness(LEASES), Signs(3, turn, "1F3 of step 2")
    assert liveness.holds(signs, 1000.0, waits=waits)
    assert liveness.holds(signs, 1000.0 + bound - 1, waits=waits)
    assert not liveness.holds(signs, 1000.0 + bound, waits=waits)
    assert liveness.holds(signs, 1000.0 + bound, waits=waits, writes=True)
    assert liveness.holds(Signs(4, turn, "1F3 of step 2"), 1001.0 + bound, waits=waits)
    assert liveness.holds(Signs(4, turn, "1F3 of step 2"), 1000.0 + 2 * bound, waits=waits)


class SetClock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_the_file_is_touched_while_the_loop_goes_on_and_not_once_it_hangs(tmp_path: Path):
    clock, file = SetClock(), tmp_path / "alive"
    pulse = Pulse(file, LEASES, clock)
    progress = Progress.of(calls_of(make_schedule("gpipe", ((0, 1),), 1), 2), 0)
    progress.counted(QueueCounts(at=1.0))

    def is_touched() -> bool:
        os.utime(file, (0.0, 0.0))
        clock.now += TOUCH
        pulse.beat(progress)
        return file.stat().st_mtime > 0.0

    signs = [is_touched() for _ in range(20)]  # it waits, and its loop does not come round
    assert all(signs[: int(LEASES.silence) - 1])
    assert not any(signs[int(LEASES.silence) + 1 :])
    progress.counted(QueueCounts(at=2.0))
    assert is_touched()


def test_no_thread_gives_signs_once_the_loop_gives_its_own_however_often_something_was_loaded(tmp_path: Path):
    before = set(threading.enumerate())
    pulse = Pulse(tmp_path / "alive", LEASES, SetClock())
    pulse.load()  # before the worker has a place
    pulse.load()  # and after
    pulse.beat(Progress.of(calls_of(make_schedule("gpipe", ((0, 1),), 1), 2), 0))
    for thread in set(threading.enumerate()) - before:
        thread.join(10)
        assert not thread.is_alive()


def test_a_file_that_cannot_be_touched_ends_no_worker(tmp_path: Path):
    Pulse(tmp_path / "none" / "alive", LEASES, SetClock()).stand_by()
