"""The stacks of this process's threads, as its control thread reads them."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec

from stageline.broker.control.answers import LONGEST_PLACE, MOST_FRAMES, MOST_THREADS, ThreadStack
from stageline.broker.control.peek import Peeked, ShowStacks
from stageline.workers.control.peeking import shown_stacks


@contextmanager
def waiting(name: str, depth: int = 1) -> Iterator[None]:
    """A thread of this name that waits `depth` calls below `wait_here`."""
    ready, over = threading.Event(), threading.Event()

    def wait_here(left: int) -> None:
        if left > 1:
            return wait_here(left - 1)
        ready.set()
        over.wait()
        return None

    thread = threading.Thread(target=wait_here, args=(depth,), name=name)
    thread.start()
    ready.wait()
    try:
        yield
    finally:
        over.set()
        thread.join()


def seen(*, bare: bool = False) -> list[ThreadStack]:
    """Stacks that another thread reads."""
    found: list[Peeked] = []
    reader = threading.Thread(target=lambda: found.append(shown_stacks(ShowStacks(7), bare=bare)))
    reader.start()
    reader.join()
    (peeked,) = found
    assert peeked.id == 7
    decoded = msgspec.msgpack.decode(msgspec.msgpack.encode(peeked), type=Peeked)
    assert decoded.threads is not None
    return decoded.threads


def test_the_main_thread_is_the_first_and_each_has_its_innermost_function_last() -> None:
    with waiting("writer"):
        main, *others = seen()
    assert main.thread == "main"
    assert any(frame.function == "seen" and "reader." in frame.text for frame in main.frames)  # starts it, or joins it
    (writer,) = [each for each in others if each.thread == "writer"]
    assert [frame.function for frame in writer.frames].index("wait_here") > 0
    assert writer.frames[-1].file.endswith("threading.py")
    assert writer.left_out == 0


def test_where_code_is_withheld_a_stack_has_functions_numbers_of_lines_and_names_of_files_alone() -> None:
    frames = [frame for thread in seen(bare=True) for frame in thread.frames]
    assert {(frame.file, frame.function) for frame in frames} >= {("test_stacks.py", "seen")}
    assert all(frame.line for frame in frames if frame.file == "test_stacks.py")
    assert not any("/" in frame.file or frame.text for frame in frames)


def test_the_thread_that_reads_is_not_shown() -> None:
    assert not any(frame.function == "shown_stacks" for each in seen() for frame in each.frames)


def test_of_a_deep_stack_the_outermost_functions_are_left_out_and_long_names_are_cut() -> None:
    with waiting("n" * 1000, depth=3 * MOST_FRAMES):
        (deep,) = [each for each in seen() if each.thread.startswith("nnn")]
    assert len(deep.frames) == MOST_FRAMES
    assert deep.left_out > 2 * MOST_FRAMES
    assert any(frame.function == "wait_here" for frame in deep.frames)
    assert len(deep.thread) == LONGEST_PLACE


def test_of_many_threads_as_many_are_shown_as_a_message_may_have() -> None:
    with waiting("first"), waiting("second"):
        assert 3 <= len(seen()) <= MOST_THREADS
