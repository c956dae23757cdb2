"""Readers draw ahead in step order, end with their process, and are replaced once if they die."""

import errno
import os
import select
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import torch
from torch import Tensor

from stageline.pipeline.data.batch import Batch
from stageline.pipeline.data.readers import Readers
from stageline.pipeline.errors import DataError
from stageline.pipeline.retry import passing_fault

Children = Callable[[], set[int]]


def numbered(step: int) -> Batch:
    """Which step it is, and which process has drawn it."""
    return torch.tensor([step]), torch.tensor([os.getpid()])


def ends_its_process(step: int) -> Batch:
    os._exit(3) if step == 2 else None
    return numbered(step)


def forks(step: int) -> Batch:
    """Without a distinction between both processes."""
    if step == 2:
        os.fork()
    return numbered(step)


def cannot_draw(step: int) -> Batch:
    raise DataError(f"no row of step {step}")


@pytest.fixture
def ahead() -> Iterator[Readers]:
    readers = Readers(numbered, 2)
    yield readers
    readers.close()


def read(readers: Readers, step: int) -> int:
    """The process that has drawn `step`."""
    match readers.batch(step):
        case (Tensor() as inputs, Tensor() as targets):
            assert inputs.tolist() == [step]
            return int(targets)
    pytest.fail("no batch")


def all_children() -> set[int]:
    return {child.pid for child in psutil.Process().children()}


@pytest.fixture
def children() -> Children:
    """The processes that this one has started since the test began."""
    before = all_children()
    return lambda: all_children() - before


def test_readers_take_turns_and_serve_any_step(ahead: Readers, children: Children) -> None:
    assert not children()  # none before the first batch
    drawn = [read(ahead, step) for step in (0, 1, 2, 3, 9, 0, 0, 1, 10**12)]
    assert len(set(drawn)) == 2
    assert set(drawn) == children()
    assert drawn[0] == drawn[2] != drawn[1] == drawn[3]


def test_none_is_left_after_close_and_others_start_with_the_next_batch(ahead: Readers, children: Children) -> None:
    first = read(ahead, 0)
    ahead.close()
    assert not children()
    assert read(ahead, 1) != first


def test_readers_end_with_their_last_use(children: Children) -> None:
    assert read(Readers(numbered, 1), 0)
    assert not children()


def test_what_cannot_be_drawn_is_told_and_the_next_step_can_be(children: Children) -> None:
    readers = Readers(cannot_draw, 1)
    for step in (0, 1, 0):
        with pytest.raises(DataError, match=f"no row of step {step}"):
            readers.batch(step)
    assert len(children()) == 1
    readers.close()


def test_a_fault_of_the_system_that_may_pass_is_known_as_one() -> None:
    def lacks_descriptors(step: int) -> Batch:
        raise DataError("dataset[3] failed") from OSError(errno.EMFILE, "too many open files")

    readers = Readers(lacks_descriptors, 1)
    with pytest.raises(DataError, match=r"dataset\[3\] failed") as failed:
        readers.batch(0)
    assert isinstance(passing_fault(failed.value), OSError)
    readers.close()


def test_what_no_frame_can_hold_is_told() -> None:
    readers = Readers(lambda step: (torch.zeros(1), 2**70), 1)
    with pytest.raises(DataError, match=r"the batch of step 0 cannot be handed over: OverflowError"):
        readers.batch(0)
    readers.close()


def test_readers_that_are_killed_are_replaced_and_what_they_had_is_drawn_again(
    ahead: Readers, children: Children
) -> None:
    read(ahead, 0)
    killed = children()
    for pid in killed:
        os.kill(pid, signal.SIGKILL)
    with pytest.warns(RuntimeWarning, match=r"reader process \d+ of the loader was killed by SIGKILL\. What it had"):
        drawn = [read(ahead, step) for step in range(1, 7)]  # the first ones may have arrived before
    assert drawn[-1] not in killed


def test_a_reader_that_was_killed_between_two_passes_is_replaced(ahead: Readers, children: Children) -> None:
    """The same process was asked again, and counted as two that died one after the other."""
    for step in range(3):
        read(ahead, step)
    killed = min(children())
    os.kill(killed, signal.SIGKILL)
    os.waitid(os.P_PID, killed, os.WEXITED | os.WNOWAIT)  # its connection is closed
    with pytest.warns(RuntimeWarning, match=rf"{killed} .* was killed by SIGKILL"):
        assert read(ahead, 0) != killed
    assert [read(ahead, step) for step in (1, 2)]


def test_readers_that_end_again_are_not_replaced_and_the_way_out_is_named(children: Children) -> None:
    readers = Readers(ends_its_process, 1)
    read(readers, 0)
    read(readers, 1)
    text = r"reader process \d+ of the loader ended with status 3; so did the one before it\. Its code has ended"
    with pytest.warns(RuntimeWarning, match="status 3"), pytest.raises(DataError, match=text):
        readers.batch(2)
    assert not children()


def test_readers_end_with_a_process_that_is_killed() -> None:
    ours, theirs = os.pipe()
    if (pid := os.fork()) == 0:
        readers = Readers(numbered, 2)
        readers.batch(0)
        os.write(theirs, b"drawn")
        signal.pause()
    os.close(theirs)
    assert os.read(ours, 5) == b"drawn"
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    assert select.select([ours], [], [], 20)[0]
    assert os.read(ours, 1) == b""  # no process has the other end any more
    os.close(ours)


def test_a_fork_has_readers_of_its_own(ahead: Readers, children: Children) -> None:
    read(ahead, 0)
    theirs = children()
    if (pid := os.fork()) == 0:
        own = read(ahead, 1) not in theirs
        ahead.close()
        os._exit(0 if own else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert read(ahead, 1) in theirs


def test_a_fork_that_comes_back_from_the_users_code_sends_no_batch() -> None:
    readers = Readers(forks, 1)
    (first, *others) = [read(readers, step) for step in range(300)]
    readers.close()
    assert set(others) == {first}


def test_a_reader_that_dies_is_replaced_though_what_it_has_forked_lives_on(tmp_path: Path) -> None:
    waits, gate = os.pipe()

    def leaves_a_fork(step: int) -> Batch:
        if step == 2 and not (tmp_path / "once").exists():
            (tmp_path / "once").touch()
            if os.fork():
                os._exit(3)
            os.close(gate)
            os._exit(len(os.read(waits, 1)))
        return numbered(step)

    readers = Readers(leaves_a_fork, 1)
    with pytest.warns(RuntimeWarning, match="ended with status 3"):
        processes = [read(readers, step) for step in range(4)]
    readers.close()
    os.close(gate)
    os.close(waits)
    assert len(set(processes)) == 2


def test_after_ctrl_c_in_a_batch_the_next_one_comes(children: Children) -> None:
    class Interrupted(Exception):
        pass

    def interrupt(number: int, frame: object) -> None:
        raise Interrupted

    def never_ends(step: int) -> Batch:
        while step == 1:
            signal.pause()
        return numbered(step)

    readers = Readers(never_ends, 1)
    read(readers, 0)
    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        with pytest.raises(Interrupted):
            readers.batch(1)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert not children()
    read(readers, 2)
    readers.close()
