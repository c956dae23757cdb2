"""Faults that may pass are tried again with growing pauses, for a bounded time; others are not."""

import errno
from collections.abc import Callable

import pytest

from stageline.pipeline import retry
from stageline.pipeline.errors import StagelineError
from stageline.pipeline.retry import ResourceFault, lacks_memory, passing_fault, persist, reason_of


class WaitingClock:
    """Time passes while it is waited."""

    def __init__(self) -> None:
        self.now = 100.0
        self.pauses: list[float] = []

    def __call__(self) -> float:
        return self.now

    def wait(self, seconds: float) -> None:
        self.pauses.append(round(seconds, 6))
        self.now += seconds


def failing(times: int, error: Callable[[], Exception]) -> Callable[[], str]:
    """Fails so many times."""
    left = iter(range(times))

    def attempt() -> str:
        if next(left, None) is None:
            return "done"
        raise error()

    return attempt


def full() -> OSError:
    return OSError(errno.ENOSPC, "No space left on device")


def test_a_full_disk_is_tried_again_after_growing_pauses_until_it_has_room():
    clock, notes = WaitingClock(), list[ResourceFault | None]()
    assert persist(failing(7, full), "write x", notes.append, now=clock, wait=clock.wait) == "done"
    assert clock.pauses == [0.1, 0.2, 0.4, 0.8, 1.6, 2.0, 2.0]
    assert notes[-1] is None
    assert notes[0] == ResourceFault("write x", "No space left on device", 100.0, 160.0, blocks=True)
    assert notes[0].told(112.2) == "cannot write x: No space left on device; tried for 12 s, gives up in 48 s"


def test_after_the_bound_the_last_error_is_raised():
    clock, notes = WaitingClock(), list[ResourceFault | None]()
    with pytest.raises(OSError, match="No space left"):
        persist(failing(10**6, full), "write x", notes.append, now=clock, wait=clock.wait)
    assert clock.now == pytest.approx(100.0 + retry.BOUND)
    assert notes[-1] is None


@pytest.mark.parametrize("code", [errno.ENOENT, errno.EACCES, errno.EROFS, errno.ENOTDIR])
def test_what_stays_as_it_is_is_not_tried_again(code: int):
    clock = WaitingClock()
    with pytest.raises(OSError, match="stays"):
        persist(failing(1, lambda: OSError(code, "stays")), "x", print, now=clock, wait=clock.wait)
    assert clock.pauses == []


@pytest.mark.parametrize("name", ["EMFILE", "ENFILE", "ENOSPC", "EDQUOT", "EFBIG", "ENOMEM", "EAGAIN", "EIO"])
def test_a_fault_is_found_under_the_error_that_it_led_to(name: str):
    fault, error = OSError(getattr(errno, name), "it"), StagelineError("the snapshot cannot be written")
    error.__cause__ = fault
    assert passing_fault(error) is fault
    assert lacks_memory(error) == (name == "ENOMEM")


def test_an_error_that_was_raised_from_itself_is_looked_at_once() -> None:
    """A worker whose user's code did `raise error from error` hung where it was to report that."""
    error, other = ValueError("a"), OSError(errno.ENOSPC, "full")
    error.__cause__ = error
    assert passing_fault(error) is None
    assert not lacks_memory(error)
    error.__cause__, other.__cause__ = other, error
    assert passing_fault(error) is other


class OddFault(OSError):
    """An error whose class answers nothing."""

    def __getattribute__(self, name: str) -> object:
        raise SystemExit(name)

    def __str__(self) -> str:
        raise SystemExit("text")


class Wordless(RuntimeError):
    def __str__(self) -> str:
        raise SystemExit("text")


def test_the_reason_of_a_fault_is_told_whatever_its_class_does() -> None:
    """It asked the class, and ended the worker with what that raised."""
    assert reason_of(OddFault(errno.ENOSPC, "no space")) == "no space"
    assert reason_of(Wordless()) == "(its text cannot be made: SystemExit)"
    assert reason_of(OSError("only words")) == "only words"
    assert reason_of(MemoryError()) == "no memory"


def test_what_torch_raises_without_memory_is_a_lack_of_memory_and_other_errors_of_it_are_not():
    import torch

    with pytest.raises(RuntimeError) as lacking:
        torch.empty(2**50)
    assert lacks_memory(lacking.value)
    with pytest.raises(RuntimeError) as mismatch:
        torch.ones(2) @ torch.ones(3)
    assert not lacks_memory(mismatch.value)
    assert passing_fault(mismatch.value) is None
    assert lacks_memory(MemoryError())
