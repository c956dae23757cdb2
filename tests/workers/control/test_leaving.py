"""The notice of a worker: until when it waits for a checkpoint, and when it has to go."""

from stageline.broker.control.leaves import Leaving
from stageline.broker.control.pauses import NOT_HELD, HeldBack
from stageline.workers.control.leaving import LAST, Notice


class Now:
    seconds = 100.0

    def __call__(self) -> float:
        return self.seconds


def test_a_notice_is_given_once_and_tells_what_is_left_of_it() -> None:
    now = Now()
    notice = Notice(now)
    assert (notice.given, notice.tell(), notice.over, notice.late) == (False, None, False, False)
    notice.give(60.0, "SIGTERM")
    notice.give(1.0, "another")
    now.seconds += 20
    assert notice.tell() == Leaving(40.0, "SIGTERM")
    assert notice.patience == 40.0 - LAST
    now.seconds += 41
    assert notice.tell() == Leaving(0.0, "SIGTERM")


def test_a_worker_leaves_with_the_checkpoint_of_its_pause_or_at_the_end_of_its_time() -> None:
    now = Now()
    notice = Notice(now)
    held = HeldBack(1, 7, leaving=True)
    assert not notice.allows(held, 7, joined=True)
    notice.give(60.0, "SIGTERM")
    assert notice.allows(held, 7, joined=True)
    assert notice.allows(NOT_HELD, 0, joined=False)
    assert not notice.allows(held, 6, joined=True)
    assert not notice.allows(NOT_HELD, 6, joined=True)
    now.seconds += 60.0 - LAST
    assert (notice.allows(NOT_HELD, 0, joined=True), notice.late) == (True, False)
    now.seconds += LAST / 2
    assert notice.late


def test_a_short_notice_leaves_time_for_the_goodbye_too() -> None:
    now = Now()
    notice = Notice(now)
    notice.give(1.0, "SIGTERM")
    assert 0.5 < notice.patience < 1.0
