"""Jobs run in order on a thread of their own; the backlog is bounded; the first failure ends it."""

import errno
import threading
import weakref
from collections.abc import Callable
from contextlib import closing

import pytest

from stageline.pipeline import retry
from stageline.pipeline.retry import ResourceFault
from stageline.workers.disk.background_writer import BackgroundWriter, WriteFailed


class Gate:
    """A job that takes as long as a test wants."""

    def __init__(self) -> None:
        self.begun = threading.Event()
        self.may_end = threading.Event()

    def __call__(self) -> None:
        self.begun.set()
        assert self.may_end.wait(30)


def test_jobs_run_in_the_order_of_submission_but_for_those_that_go_first():
    done: list[str] = []
    gate = Gate()
    with closing(BackgroundWriter("test", limit=1)) as writer:
        writer.submit(gate)
        assert gate.begun.wait(30)
        writer.submit(lambda: done.append("second"))
        writer.submit(lambda: done.append("third"))
        writer.submit(lambda: done.append("first"), first=True)
        assert not writer.flush(0.01)
        gate.may_end.set()
        assert writer.flush(30)
    assert done == ["first", "second", "third"]


def test_a_key_has_room_below_the_limit_and_a_job_without_a_size_needs_none():
    gate = Gate()
    with closing(BackgroundWriter("test", limit=10)) as writer:
        writer.submit(gate, "a", 100)  # is running, and does not wait
        assert gate.begun.wait(30)
        assert writer.has_room("a")
        writer.submit(lambda: None, "a", 9)
        assert writer.has_room("a")
        writer.submit(lambda: None, "a", 1)
        assert not writer.has_room("a", 0.01)
        assert writer.has_room("b")
        writer.submit(lambda: None, "a")
        gate.may_end.set()
        assert writer.has_room("a", 30)


def test_a_key_is_done_once_none_of_its_jobs_waits_or_runs():
    gates = [Gate(), Gate()]
    with closing(BackgroundWriter("test", limit=1)) as writer:
        assert writer.is_done("a")
        for gate in gates:
            writer.submit(gate, "a", 1)
        assert gates[0].begun.wait(30)
        assert not writer.is_done("a", 0.01)
        assert writer.is_done("b")
        gates[0].may_end.set()
        assert gates[1].begun.wait(30)
        assert not writer.is_done("a", 0.01)
        gates[1].may_end.set()
        assert writer.is_done("a", 30)


def test_what_a_job_wrote_is_not_kept_while_there_is_no_other():
    written = Gate()
    kept = weakref.ref(written)
    written.may_end.set()
    with closing(BackgroundWriter("test", limit=1)) as writer:
        writer.submit(written, "a", 1)
        del written
        assert writer.is_done("a", 30)
        assert kept() is None


def test_submitting_waits_for_room():
    gate = Gate()
    with closing(BackgroundWriter("test", limit=1)) as writer:
        writer.submit(gate)
        assert gate.begun.wait(30)
        writer.submit(lambda: None, size=1)
        other = threading.Thread(target=writer.submit, args=(lambda: None, None, 1))
        other.start()
        other.join(0.05)
        assert other.is_alive()
        gate.may_end.set()
        other.join(30)
        assert not other.is_alive()


def test_the_first_failure_ends_the_writing_and_lets_no_submission_wait():
    gate, done = Gate(), []
    failures: list[Exception] = []
    reported = threading.Event()

    def failed(error: Exception) -> None:
        failures.append(error)
        reported.set()

    def fail() -> None:
        gate()
        raise OSError("the disk is full")

    writer = BackgroundWriter("test", 1, failed)
    writer.submit(fail)
    assert gate.begun.wait(30)
    writer.submit(lambda: done.append(1), size=1)
    gate.may_end.set()
    assert reported.wait(30)
    writer.submit(lambda: done.append(2), size=1)
    writer.submit(lambda: done.append(3), size=1)
    assert not writer.flush()
    writer.close()
    assert failures == [writer.failure]
    assert not done


def test_closing_drops_what_has_not_begun_in_time():
    gate, done = Gate(), []
    writer = BackgroundWriter("test", limit=1)
    writer.submit(gate)
    assert gate.begun.wait(30)
    writer.submit(lambda: done.append(1))
    writer.close(0.01)
    writer.submit(lambda: done.append(2))
    gate.may_end.set()
    writer.close(30)
    assert not done


def test_without_dropping_all_jobs_are_done_though_closing_did_not_wait_for_them():
    gate, done, ended = Gate(), [], threading.Event()
    writer = BackgroundWriter("test", limit=1)
    writer.submit(gate)
    assert gate.begun.wait(30)
    writer.submit(lambda: done.append(1))
    writer.submit(ended.set)
    writer.close(0.01, drop=False)
    gate.may_end.set()
    assert ended.wait(30)
    assert done == [1]


class FullDisk:
    """A job that fails as long as the disk is full."""

    def __init__(self, done: list[str]) -> None:
        self.full = True
        self._done = done

    def __call__(self) -> None:
        if self.full:
            raise OSError(errno.ENOSPC, "No space left on device")
        self._done.append("written")

    def make_room(self) -> None:
        self.full = False
        self._done.append("room")


def noted(notes: list[ResourceFault | None], event: threading.Event) -> Callable[[ResourceFault | None], None]:
    def note(fault: ResourceFault | None) -> None:
        notes.append(fault)
        event.set()

    return note


def test_what_a_full_disk_stops_is_tried_again_and_what_goes_first_may_make_room():
    done, notes, faulty = list[str](), list[ResourceFault | None](), threading.Event()
    disk = FullDisk(done)
    with closing(BackgroundWriter("test", limit=1, note=noted(notes, faulty))) as writer:
        writer.submit(disk, size=1, what="write x")
        assert faulty.wait(30)
        writer.submit(lambda: done.append("next"), size=1)  # one more may wait, as without the fault
        assert not writer.has_room()
        assert not writer.flush(0)
        writer.submit(disk.make_room, first=True)
        assert writer.flush(30)
        assert writer.failure is None
    assert done == ["room", "written", "next"]
    assert notes[0] is not None
    assert notes[0].what == "write x"
    assert notes[-1] is None


def test_a_disk_that_stays_full_ends_the_writing(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(retry, "BOUND", 0.3)
    notes: list[ResourceFault | None] = []
    with closing(BackgroundWriter("test", limit=1, note=notes.append)) as writer:
        writer.submit(FullDisk([]), size=1)
        assert not writer.flush(30)
        assert isinstance(writer.failure, OSError)
        assert writer.tried >= 0.3
    assert notes[-1] is None


def test_a_full_disk_ends_the_writing_at_once_where_a_job_would_have_to_wait_for_it():
    notes, faulty = list[ResourceFault | None](), threading.Event()
    with closing(BackgroundWriter("test", limit=1, note=noted(notes, faulty), patience=False)) as writer:
        writer.submit(FullDisk([]), size=1)
        assert faulty.wait(30)
        writer.submit(lambda: None, size=1)
        assert writer.failure is None
        writer.submit(lambda: None, size=1)
        assert isinstance(writer.failure, OSError)


def test_a_key_may_have_a_limit_of_its_own():
    gate = Gate()
    with closing(BackgroundWriter("test", limit=1)) as writer:
        writer.grant("large", 100)
        writer.submit(gate)
        assert gate.begun.wait(30)
        writer.submit(lambda: None, "large", 99)
        writer.submit(lambda: None, "small", 1)
        assert writer.has_room("large")
        assert not writer.has_room("small")
        writer.submit(lambda: None, "large", 1)
        assert not writer.has_room("large")
        gate.may_end.set()


def test_what_ended_the_writing_is_raised_and_a_disk_that_is_busy_is_named():
    class Late(WriteFailed):
        """Error of a writer's owner for a disk that is busy."""

    def fail() -> None:
        raise WriteFailed("taps/a cannot be written")

    def err() -> None:
        raise ZeroDivisionError("by accident")

    with closing(BackgroundWriter("test", limit=1)) as writer:
        writer.submit(lambda: None, what="write taps/a")
        assert writer.flush(30)
        writer.demand(True, 3, Late)
        with pytest.raises(Late, match="still busy after 3 s: the worker could not write taps/a"):
            writer.demand(False, 3, Late)
        writer.submit(fail)
        writer.flush(30)
        with pytest.raises(WriteFailed, match=r"^taps/a cannot be written \[SL407\]$"):
            writer.demand(True, 3)
    with closing(BackgroundWriter("test", limit=1)) as writer:
        writer.submit(err)
        writer.flush(30)
        with pytest.raises(Late, match="a bug in stageline while it wrote files: ZeroDivisionError: by accident"):
            writer.demand(True, 3, Late)
