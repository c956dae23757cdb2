"""The keeper of a worker decides by exit codes, with growing pauses, and by the age of the alive file."""

import errno
import os
from collections.abc import Iterator

import pytest

from stageline.pipeline.errors import ExitCode
from stageline.workers.launch.keeper import LONGEST_PAUSE, POLL, STARTING, STEADY, AliveFile, AliveWatch, Restarts


def pauses(*worked: float, status: int = 1) -> Iterator[float | None]:
    restarts = Restarts()
    for seconds in worked:
        yield restarts.next(status, seconds, over=False, told=False).pause


def test_pauses_double_up_to_a_minute_and_begin_again_after_a_worker_that_has_worked_for_a_while():
    assert [*pauses(*[0.5] * 8)] == [1, 2, 4, 8, 16, 32, LONGEST_PAUSE, LONGEST_PAUSE]
    assert [*pauses(0.5, 0.5, STEADY, 0.5)] == [1, 2, 1, 2]


@pytest.mark.parametrize("status", [1, 3, 69, 130, 42, -9, -11])
def test_a_worker_is_started_again_unless_the_run_is_over_or_a_signal_has_told_the_keeper_to_end(status: int):
    told = Restarts().next(status, 1.0, over=False, told=True)
    over = Restarts().next(status, 1.0, over=True, told=False)
    assert (told.pause, over.pause) == (None, None)
    assert Restarts().next(status, 1.0, over=False, told=False).pause == 1.0
    assert over.code == (ExitCode.FAILED if status in (42, -9, -11) else status)
    assert "the run is over" in over.said


@pytest.mark.parametrize("code", [0, 2, 75, 76, 77, 78])
def test_final_exit_codes_end_the_keeper_with_the_same(code: int):
    found = Restarts().next(code, 7.0, over=False, told=False)
    assert (found.pause, found.code) == (None, code)
    assert f"exit code {code}" in found.said


def test_a_line_says_how_the_worker_ended_and_when_it_is_tried_again():
    killed = Restarts().next(-11, 3.0, over=False, told=False)
    assert "killed by SIGSEGV after 3 s: it is started again in 1 s" in killed.said
    hung = Restarts().next(-9, 90.0, over=False, told=False, hung=60.0)
    assert "60 s" in hung.said
    assert "hung" in hung.said


def test_a_worker_that_cannot_be_started_is_tried_again_with_the_same_pauses():
    restarts = Restarts()
    found = restarts.not_started(OSError(errno.ENOMEM, "Cannot allocate memory"))
    assert (found.pause, "Cannot allocate memory" in found.said, "in 1 s" in found.said) == (1.0, True, True)
    assert restarts.next(1, 0.5, over=False, told=False).pause == 2.0


class Touched:
    """An alive file and the keeper's clock."""

    def __init__(self) -> None:
        self.modified: float | None = None
        self.now = 1000.0
        self.watch = AliveWatch(lambda: self.modified, 5.0)

    def after(self, seconds: float) -> bool:
        """True if the worker hangs at some look within so many seconds."""
        end, found = self.now + seconds, False
        while self.now < end:
            self.now += POLL
            found = found or self.watch.hangs(self.now)
        return found


def test_a_worker_hangs_if_its_alive_file_gets_old_and_has_more_time_to_start():
    file = Touched()
    assert not file.after(STARTING - 1)
    file.modified = 1.0
    assert not file.after(4.5)
    file.modified = 2.0
    assert not file.after(4.5)
    assert file.after(1.0)


def test_time_in_which_the_keeper_itself_was_stopped_does_not_count():
    file = Touched()
    file.modified = 1.0
    assert not file.after(1.0)
    file.now += 3600
    assert not file.after(2.0)
    assert file.after(4.0)


def test_a_file_without_a_name_is_touched_by_its_path(tmp_path):
    with AliveFile("") as file:
        os.utime(file.path, (0.0, 0.0))
        assert file.modified() == 0.0
        with open(file.path, "w") as own:
            own.write("x")
        assert file.modified() > 0.0
    assert AliveFile(str(tmp_path / "alive")).modified() is None
